// How one track is drawn: a custom series with a single item, so that the chart library has a few dozen shapes to keep
// rather than one an action. Only what is in view is drawn: bars of one fill as one shape, and where bars get narrower
// than a few pixels, an image whose pixels are the mean of what they cover.

const MIN_MEAN_WIDTH_PX = 5; // on average; below it the image takes over
const MAX_BARS = 8000; // 8,000 bars take about 10 ms to fill
const MIN_LABEL_ROW_PX = 15;
const LABEL_SIZE_PX = 11;
const LETTER_PX = 6.6; // of a label

const BarsShape = echarts.graphic.extendShape({
  type: "bars",
  shape: { boxes: [] }, // x, y, width, height, and again
  buildPath(context, { boxes }) {
    for (let i = 0; i < boxes.length; i += 4) context.rect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
  },
});
const RingsShape = echarts.graphic.extendShape({
  type: "rings",
  shape: { centres: [], radius: 3 }, // x, y, and again
  buildPath(context, { centres, radius }) {
    for (let i = 0; i < centres.length; i += 2) {
      context.moveTo(centres[i] + radius, centres[i + 1]);
      context.arc(centres[i], centres[i + 1], radius, 0, 2 * Math.PI);
    }
  },
});
echarts.graphic.registerShape("bars", BarsShape);
echarts.graphic.registerShape("rings", RingsShape);

// Where rows lie in a track's plot of `height` pixels that begins at `top`.
function rowsOf(track, top, height) {
  const pitch = height / track.numRanks;
  const gap = pitch >= 20 ? 5 : pitch >= 12 ? 3 : pitch >= 6 ? 2 : 1;
  return { top, pitch, gap, barHeight: pitch - gap, barTop: (rank) => top + rank * pitch + gap / 2 };
}

// Everything inside a track's plot, as elements of the chart library. `view` has begin, end (time) and toX.
function drawTrack(track, plot, view, palette, showPath) {
  const rows = rowsOf(track, plot.y, plot.height);
  const window = visibleBars(track, view);
  const meanWidth = plot.width / Math.max(1, window.mostOnRank);
  const lanes = [];
  for (let rank = 0; rank < track.numRanks; rank++) lanes.push(plot.x, rows.barTop(rank), plot.width, rows.barHeight);
  const shapes = [boxes(lanes, palette.lane)];
  if (meanWidth < MIN_MEAN_WIDTH_PX || window.count > MAX_BARS) {
    shapes.push(averaged(track, plot, view, rows, window, palette));
  } else {
    shapes.push(...barShapes(track, view, rows, window, palette));
    shapes.push(...skippedShapes(track, view, rows, palette));
  }
  shapes.push(cutShape(track, view, rows, palette));
  if (showPath) shapes.push(pathShape(track, view, rows, palette));
  const endX = view.toX(track.makespan);
  shapes.push({
    type: "line", silent: true, shape: { x1: endX, y1: plot.y, x2: endX, y2: plot.y + plot.height },
    style: { stroke: palette.muted, lineWidth: 1, lineDash: [3, 3] },
  });
  return { type: "group", silent: true, children: shapes };
}

const boxes = (list, fill) => ({ type: "bars", silent: true, shape: { boxes: list }, style: { fill } });

// For every rank the range of its bars that is in view.
function visibleBars(track, view) {
  const ranges = [];
  let count = 0;
  let mostOnRank = 0;
  for (let rank = 0; rank < track.numRanks; rank++) {
    const from = firstBarAfter(track, track.firstBar[rank], track.firstBar[rank + 1], view.begin);
    let to = firstBarAfter(track, from, track.firstBar[rank + 1], view.end);
    if (to < track.firstBar[rank + 1] && track.start[track.bars[to]] <= view.end) to += 1;
    ranges.push([from, to]);
    count += to - from;
    mostOnRank = Math.max(mostOnRank, to - from);
  }
  return { ranges, count, mostOnRank };
}

function barShapes(track, view, rows, window, palette) {
  const byFill = palette.fills.map(() => []);
  const labels = [];
  window.ranges.forEach(([from, to], rank) => {
    const y = rows.barTop(rank);
    for (let position = from; position < to; position++) {
      const node = track.bars[position];
      const x = view.toX(track.start[node]);
      const width = view.toX(track.end[node]) - x;
      const fill = fillOf(track.kind[node], track.ratio[node]);
      // Half a pixel of lane on either side keeps neighbours apart.
      const inset = width > 4 ? 0.5 : 0;
      const height = rows.barHeight * track.barHeights[track.stage[node]];
      const top = y + rows.barHeight - height;
      byFill[fill].push(x + inset, top, Math.max(width - 2 * inset, 0.75), height);
      if (rows.pitch >= MIN_LABEL_ROW_PX) addLabel(labels, track, node, x, top + height / 2, width, palette.labels[fill], palette.font, view);
    }
  });
  const shapes = [];
  byFill.forEach((list, fill) => list.length && shapes.push(boxes(list, palette.fills[fill])));
  return [...shapes, ...labels];
}

function addLabel(labels, track, node, x, middle, width, fill, font, view) {
  // Where a bar is only partly in view, its label stands in the part that is.
  const left = Math.max(x, view.left);
  const room = Math.min(x + width, view.right) - left;
  const text = [actionText(track, node), `${track.microbatch[node]}`].find((each) => each.length * LETTER_PX + 6 <= room);
  if (text === undefined) return;
  labels.push({
    type: "text", silent: true,
    style: {
      text, fill, x: left + room / 2, y: middle, align: "center", verticalAlign: "middle",
      font: `${LABEL_SIZE_PX}px ${font}`,
    },
  });
}

// The bars as an image, one row of averages a rank: each pixel is the mean of the bars and the idle lane under it.
function averaged(track, plot, view, rows, window, palette) {
  const density = devicePixelRatio;
  const width = Math.max(1, Math.round(plot.width * density));
  const height = Math.max(1, Math.round(plot.height * density));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const idle = channels(palette.lane);
  const sums = new Float32Array(3 * width);
  const covered = new Float32Array(width);
  const scale = width / (view.end - view.begin);
  window.ranges.forEach(([from, to], rank) => {
    sums.fill(0);
    covered.fill(0);
    for (let position = from; position < to; position++) {
      const node = track.bars[position];
      const colour = palette.fillChannels[fillOf(track.kind[node], track.ratio[node])];
      const x0 = Math.max((track.start[node] - view.begin) * scale, 0);
      const x1 = Math.min((track.end[node] - view.begin) * scale, width);
      for (let column = Math.floor(x0); column < x1; column++) {
        const share = Math.min(x1, column + 1) - Math.max(x0, column);
        covered[column] += share;
        for (let channel = 0; channel < 3; channel++) sums[3 * column + channel] += share * colour[channel];
      }
    }
    const first = Math.round((rows.barTop(rank) - plot.y) * density);
    const last = Math.min(Math.round((rows.barTop(rank) - plot.y + rows.barHeight) * density), height);
    const line = pixels.subarray(first * width, (first + 1) * width);
    for (let column = 0; column < width; column++) {
      const rest = Math.max(0, 1 - covered[column]);
      const value = (channel) => Math.min(255, sums[3 * column + channel] + rest * idle[channel]);
      line[column] = (255 << 24) | (value(2) << 16) | (value(1) << 8) | value(0);
    }
    for (let row = first + 1; row < last; row++) pixels.copyWithin(row * width, first * width, (first + 1) * width);
  });
  context.putImageData(image, 0, 0);
  return { type: "image", silent: true, style: { image: canvas, x: plot.x, y: plot.y, width: plot.width, height: plot.height } };
}

function skippedShapes(track, view, rows, palette) {
  const centres = [];
  for (const node of track.skipped) {
    if (track.start[node] < view.begin || track.start[node] > view.end) continue;
    centres.push(view.toX(track.start[node]), rows.barTop(track.rankOfNode[node]) + rows.barHeight / 2);
  }
  const style = { fill: palette.page, stroke: palette.skipped, lineWidth: 1.5 };
  return centres.length ? [{ type: "rings", silent: true, shape: { centres, radius: Math.min(3, rows.barHeight / 3) }, style }] : [];
}

function cutShape(track, view, rows, palette) {
  const list = [];
  const width = rows.pitch >= 12 ? 3 : 2;
  for (const node of track.cutHere) {
    if (track.end[node] < view.begin || track.end[node] > view.end) continue;
    list.push(view.toX(track.end[node]) - width, rows.barTop(track.rankOfNode[node]), width, rows.barHeight);
  }
  return boxes(list, palette.cut);
}

// Along the lower edge of the bars, and straight across where the path goes from rank to rank.
function pathShape(track, view, rows, palette) {
  const lineWidth = rows.pitch >= 12 ? 2.5 : 1.5;
  const points = [];
  for (const node of track.path) {
    const y = rows.barTop(track.rankOfNode[node]) + rows.barHeight - lineWidth / 2;
    points.push([view.toX(track.start[node]), y], [view.toX(track.end[node]), y]);
  }
  return { type: "polyline", silent: true, shape: { points }, style: { stroke: palette.accent, lineWidth, fill: null, lineJoin: "round" } };
}
