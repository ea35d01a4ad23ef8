"use strict";
// The view's data, unpacked. Times are in the time axis's unit (`data.unit`), nodes are numbered as in the file: rank after rank.

const KIND_NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const TICKS_PER_S = 1e9;
const RATIO_STEPS = 1e4;

async function readData() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(unpacked).json();
  data.tracks = data.tracks.map((raw) => makeTrack(raw, data.ticks_per_unit));
  data.total = data.tracks.reduce((longest, track) => Math.max(longest, track.makespan), 0) || 1;
  return data;
}

function makeTrack(raw, ticksPerUnit) {
  const numNodes = raw.kind.length;
  const inUnits = (ticks) => Float64Array.from(ticks, (tick) => (tick < 0 ? NaN : tick / ticksPerUnit));
  const start = inUnits(raw.start);
  const length = inUnits(raw.length);
  const end = start.map((time, node) => time + length[node]);
  const marks = (nodes) => {
    const flags = new Uint8Array(numNodes);
    for (const node of nodes) flags[node] = 1;
    return flags;
  };
  const firstOfRank = new Int32Array(raw.rank_sizes.length + 1);
  raw.rank_sizes.forEach((size, rank) => (firstOfRank[rank + 1] = firstOfRank[rank] + size));
  const track = {
    name: raw.name,
    numRanks: raw.rank_sizes.length,
    numStages: raw.num_stages,
    numMicrobatches: raw.num_microbatches,
    barHeights: raw.bar_heights, // by stage, as shares of a row
    bubbleRatio: raw.bubble_ratio,
    makespan: end.reduce((latest, time) => Math.max(latest, time), 0),
    stage: raw.stage,
    kind: raw.kind,
    microbatch: raw.microbatch,
    ratio: Float32Array.from(raw.ratio, (ratio) => (ratio < 0 ? NaN : ratio / RATIO_STEPS)),
    measured: raw.measured && inUnits(raw.measured),
    isSkipped: marks(raw.skipped),
    isCutHere: marks(raw.cut_here),
    isCritical: marks(raw.path),
    skipped: raw.skipped,
    cutHere: raw.cut_here,
    path: raw.path,
    cuts: raw.cuts,
    start,
    end,
    firstOfRank,
  };
  // What has a bar: actions that ran, rank after rank; bars of rank r are bars[firstBar[r]] .. bars[firstBar[r + 1] - 1].
  track.firstBar = new Int32Array(track.numRanks + 1);
  const bars = [];
  for (let rank = 0; rank < track.numRanks; rank++) {
    for (let node = firstOfRank[rank]; node < firstOfRank[rank + 1]; node++) if (!track.isSkipped[node]) bars.push(node);
    track.firstBar[rank + 1] = bars.length;
  }
  track.bars = Int32Array.from(bars);
  track.rankOfNode = new Int32Array(numNodes);
  for (let rank = 0; rank < track.numRanks; rank++) track.rankOfNode.fill(rank, firstOfRank[rank], firstOfRank[rank + 1]);
  return track;
}

// First position in bars[from .. to) whose bar does not lie wholly before `time`.
function firstBarAfter(track, from, to, time) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (track.end[track.bars[middle]] < time) from = middle + 1;
    else to = middle;
  }
  return from;
}

// The action of a rank that runs at `time`, or within `slack` of it; -1 if there is none.
function nodeAt(track, rank, time, slack) {
  const position = firstBarAfter(track, track.firstBar[rank], track.firstBar[rank + 1], time - slack);
  let best = -1;
  let bestDistance = slack;
  for (let next = position; next < track.firstBar[rank + 1]; next++) {
    const node = track.bars[next];
    const distance = Math.max(track.start[node] - time, time - track.end[node], 0);
    if (track.start[node] > time + slack) break;
    if (distance <= bestDistance && (best < 0 || distance < bestDistance)) [best, bestDistance] = [node, distance];
  }
  return best;
}

const actionText = (track, node) => `${track.stage[node]}${track.kind[node]}${track.microbatch[node]}`;

// The same action in another track, which may have another schedule; -1 if it has none.
function twinOf(track, node, other) {
  if (!other.byText) {
    other.byText = new Map();
    for (let each = 0; each < other.kind.length; each++) other.byText.set(actionText(other, each), each);
  }
  return other.byText.get(actionText(track, node)) ?? -1;
}

const UNITS = [["s", 1], ["ms", 1e3], ["µs", 1e6]];

// A time of the axis in the unit that fits it: the largest of which it has two.
function formatTime(data, time, digits = 4) {
  const seconds = (time * data.ticks_per_unit) / TICKS_PER_S;
  const [unit, perSecond] = UNITS.find(([, each]) => seconds * each >= 2) ?? [data.unit, TICKS_PER_S / data.ticks_per_unit];
  const value = seconds * perSecond;
  const rounded = value >= 10 ** digits ? Math.round(value) : Number(value.toPrecision(digits));
  return `${rounded.toLocaleString("en", { maximumFractionDigits: 9 })} ${unit}`;
}

const formatRatio = (ratio) => `${(100 * ratio).toLocaleString("en", { maximumFractionDigits: 1 })} %`;

// What is special about an action, in words.
function remarks(track, node) {
  const words = [];
  if (track.isSkipped[node]) words.push("skipped: its micro-batch is cut above");
  if (track.isCutHere[node]) words.push("cut here: no backward below");
  if (track.isCritical[node]) words.push("on the critical path");
  return words;
}

// Name and value of everything that is known about an action, for the tip and for screen readers.
function describe(data, track, node) {
  const rows = [
    ["Stage", track.stage[node]],
    ["Micro-batch", track.microbatch[node]],
    ["Rank", track.rankOfNode[node]],
    ["Start", formatTime(data, track.start[node], 6)],
  ];
  for (const other of data.tracks) {
    const twin = other === track ? node : twinOf(track, node, other);
    if (twin < 0) continue;
    const time = other.isSkipped[twin] ? "skipped" : formatTime(data, other.end[twin] - other.start[twin]);
    rows.push([`Duration, ${other.name}`, time, other === track]);
  }
  const measured = track.measured ? track.measured[node] : NaN;
  if (!Number.isNaN(measured)) rows.push(["Measured", formatTime(data, measured)]);
  if (!Number.isNaN(track.ratio[node])) rows.push(["Freeze ratio", formatRatio(track.ratio[node])]);
  return rows;
}
