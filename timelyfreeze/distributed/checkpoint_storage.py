"""Reading and writing through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from timelyfreeze.distributed.checkpoint_folder import METADATA_FILE
from timelyfreeze.distributed.checkpoint_ranks import CheckpointError, Ranks
from timelyfreeze.distributed.checkpoint_values import Path, key_of
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.files import sync_folder


def write_values(folder: FilePath, values: Mapping[Path, Any], ranks: Ranks) -> None:
    """Write all ranks' values into the folder, fsynced; CheckpointError on all ranks if one of them fails.

    These are the steps of DCP's own ``save``. Its collectives could not be given up where a rank is lost, and leave the
    others waiting where a rank's exception cannot be pickled.
    """
    what = "cannot write the checkpoint"
    writer = _Writer(folder, overwrite=False)
    planner = _SavePlanner({key_of(path): path for path in values})
    is_first = ranks.rank == 0
    metadata: list[Metadata] = []  # on the first rank alone

    def plan() -> SavePlan:
        planner.set_up_planner({key_of(path): value for path, value in values.items()}, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> list[SavePlan]:
        every, described = planner.create_global_plan(plans)
        metadata.append(described)
        return writer.prepare_global_plan(every)

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(final[ranks.rank]), planner).wait()

    plans = ranks.share(what, plan)
    final = ranks.first(what, plan_all)
    results = ranks.share(what, write)
    ranks.first(what, lambda: writer.finish(metadata[0], results))


# All that the metadata of write_values name. Anything else that a pickle can call is not looked up, let alone called.
_IN_METADATA = {
    **{module: {"Path", "PosixPath"} for module in ("pathlib", "pathlib._local")},  # the second from Python 3.13 on
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else, so that a file from elsewhere cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return super().find_class(module, name)


class SavedValues:
    """What is in a checkpoint, without its data. DCP's metadata is a pickle, of which only known classes are read.

    Raises OSError or CheckpointError if the metadata cannot be read.
    """

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        try:
            with open(folder / METADATA_FILE, "rb") as file:
                self._metadata = _MetadataUnpickler(file).load()
            self.paths: dict[str, Path] = {key: tuple(path) for key, path in self._metadata.planner_data.items()}
            self._saved = self._metadata.state_dict_metadata
        except OSError:
            raise
        except Exception as error:  # whatever pickle raises on bytes that it does not understand
            raise CheckpointError(
                problem(
                    "damaged checkpoint", got=f"{type(error).__name__}: {error}", where=f"'{folder / METADATA_FILE}'"
                )
            ) from error

    def tensor(self, path: Path) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and type of a tensor; None for any other value."""
        saved = self._saved[key_of(path)]
        return (saved.size, saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None

    def cut_files(self, paths: Iterable[Path]) -> list[str]:
        """A fault for every file that is missing, or too short for what it holds of ``paths``."""
        keys = {key_of(path) for path in paths}
        needed: dict[str, int] = {}
        for index, place in self._metadata.storage_data.items():
            if index.fqn in keys:
                end = place.offset + place.length
                needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        faults = []
        for name, end in sorted(needed.items()):
            file = self._folder / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                got = "no such file" if size is None else f"{size} bytes"
                faults.append(problem("damaged checkpoint", expected=f"{end} bytes", got=got, where=f"'{file}'"))
        return faults

    def read(self, values: dict[Path, Any], ranks: Ranks) -> None:
        """Read each rank's ``values``: into a tensor that is there, and in place of anything else."""
        flat = {key_of(path): value for path, value in values.items()}

        def read() -> None:  # what each rank reads depends on no other
            with _unwrapped():
                load(flat, storage_reader=_Reader(self._folder, self._metadata), planner=_LoadPlanner(), no_dist=True)

        ranks.agree("cannot read the checkpoint", read)
        values.update((path, flat[key_of(path)]) for path in values)


class _SavePlanner(DefaultSavePlanner):
    """Takes values that are flat already; the paths go into the metadata, where DCP's own tools look for them."""

    def __init__(self, paths: dict[str, Path]) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.mappings = dict(self._paths)
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_alike(all_plans)
        return super().create_global_plan(all_plans)


class _LoadPlanner(DefaultLoadPlanner):
    """Values that are no tensors are read without unpickling anything but plain data."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Writer(FileSystemWriter):
    """One file a rank, fsynced with its folder. With more threads DCP would lose a thread's exception."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        sync_folder(str(self.path))
        return written


class _Reader(FileSystemReader):
    """Unpickles the metadata no second time, and checks every byte: torch.load ignores the CRC-32 of its records."""

    def __init__(self, folder: FilePath, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        item = io.BytesIO(super()._slice_file(file, sinfo).read(-1))
        try:
            with zipfile.ZipFile(item) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(f"checksum of {broken} does not match")
        except zipfile.BadZipFile as error:
            file = f"'{self._folder / sinfo.relative_path}'"
            raise CheckpointError(problem("damaged checkpoint", got=error, where=file)) from error
        item.seek(0)
        return item


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Of a value that several ranks have, one rank's is written: refuse values that cannot be the same."""
    first: dict[str, tuple[int, str]] = {}
    faults = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            kind = _kind_of(item)
            owner, known = first.setdefault(item.index.fqn, (rank, kind))
            if kind != known:
                faults.append(
                    problem(
                        f"two ranks have another '{item.index.fqn}'",
                        expected=f"{known}, as on rank {owner}",
                        got=kind,
                        where=f"rank {rank}",
                    )
                )
    raise_all(CheckpointError, faults)


def _kind_of(item: WriteItem) -> str:
    data = item.tensor_data
    return "no tensor" if data is None else f"{tuple(data.size)} {data.properties.dtype}"


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Around a load of one process: what was raised inside, and no warning that no group is used."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # no Exception, but a BaseException
        (failure, _) = next(iter(error.failures.values()))
        raise failure from None
