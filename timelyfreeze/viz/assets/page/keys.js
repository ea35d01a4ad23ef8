// The timeline by keyboard. Keys act while the timeline has the focus.

function addKeys(timeline) {
  const pan = (share) => () => panBy(timeline, share);
  const actions = {
    ArrowLeft: pan(-PAN_STEP), a: pan(-PAN_STEP), ArrowRight: pan(PAN_STEP), d: pan(PAN_STEP),
    "+": () => zoomBy(timeline, ZOOM_STEP), "=": () => zoomBy(timeline, ZOOM_STEP), w: () => zoomBy(timeline, ZOOM_STEP),
    "-": () => zoomBy(timeline, 1 / ZOOM_STEP), _: () => zoomBy(timeline, 1 / ZOOM_STEP), s: () => zoomBy(timeline, 1 / ZOOM_STEP),
    0: () => showAll(timeline),
    Home: () => showRange(timeline, 0, timeline.end - timeline.begin),
    End: () => showRange(timeline, timeline.data.total - (timeline.end - timeline.begin), timeline.data.total),
    "Shift+ArrowLeft": () => selectBeside(timeline, -1), "Shift+ArrowRight": () => selectBeside(timeline, 1),
    ArrowUp: () => selectOnRank(timeline, -1), ArrowDown: () => selectOnRank(timeline, 1),
    c: () => togglePath(timeline), "?": () => toggleHelp(),
    Escape: () => {
      select(timeline, null);
      hideTip();
      toggleHelp(false);
    },
  };
  timeline.element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const act = actions[event.shiftKey && key.startsWith("Arrow") ? `Shift+${key}` : key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function togglePath(timeline) {
  timeline.showPath = !timeline.showPath;
  document.getElementById("show-path").checked = timeline.showPath;
  redrawTimeline(timeline);
}

function toggleHelp(shown) {
  const help = document.getElementById("help");
  help.hidden = shown === undefined ? !help.hidden : !shown;
  document.getElementById("help-button").setAttribute("aria-expanded", String(!help.hidden));
}

// The action before (-1) or after (1) the selected one on its rank; skipped ones too.
function selectBeside(timeline, step) {
  const { selected } = timeline;
  if (!selected) return selectOnRank(timeline, 0);
  const { track, node } = selected;
  const rank = track.rankOfNode[node];
  const next = { track, node: Math.min(Math.max(node + step, track.firstOfRank[rank]), track.firstOfRank[rank + 1] - 1) };
  timeline.cursor = middleOf(next);
  focusAction(timeline, next);
}

// The action that runs at the same time on the rank above (-1) or below (1), across tracks.
function selectOnRank(timeline, step) {
  const { selected, data } = timeline;
  const rows = data.tracks.flatMap((track) => Array.from({ length: track.numRanks }, (_, rank) => ({ track, rank })));
  let row = 0;
  if (selected) {
    const rank = selected.track.rankOfNode[selected.node];
    row = rows.findIndex((each) => each.track === selected.track && each.rank === rank) + step;
  } else {
    timeline.cursor = timeline.begin;
  }
  const { track, rank } = rows[Math.min(Math.max(row, 0), rows.length - 1)];
  if (track.firstBar[rank] === track.firstBar[rank + 1]) return;
  const position = firstBarAfter(track, track.firstBar[rank], track.firstBar[rank + 1] - 1, timeline.cursor);
  focusAction(timeline, { track, node: track.bars[position] });
}

// Selects an action by key: brings it into view, shows its tip there and tells screen readers.
function focusAction(timeline, selected) {
  const { track, node } = selected;
  const span = timeline.end - timeline.begin;
  if (track.start[node] < timeline.begin || track.end[node] > timeline.end) {
    showRange(timeline, middleOf(selected) - span / 2, middleOf(selected) + span / 2);
  }
  select(timeline, selected);
  timeline.element.querySelector(".outline:not(.twin)")?.scrollIntoView({ block: "nearest" });
  const box = boxOf(timeline, selected);
  const frame = timeline.element.getBoundingClientRect();
  if (box) showActionTip(timeline, selected, frame.left + box.left + box.width / 2, frame.top + box.top + box.height);
  const words = describe(timeline.data, track, node).map(([name, value]) => `${name} ${value}`);
  document.getElementById("announcement").textContent =
    `${actionText(track, node)}, ${KIND_NAMES[track.kind[node]]}, ${track.name}. ${[...words, ...remarks(track, node)].join(", ")}.`;
}
