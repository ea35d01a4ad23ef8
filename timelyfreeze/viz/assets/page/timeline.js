// The timeline: all tracks in one chart on one time axis, with its mouse and its keys.

const LEFT_PX = 64;
const RIGHT_PX = 20;
const NAME_PX = 44; // above every track
const AXIS_PX = 30; // below the last one
const SLIDER_PX = 26;
const ZOOM_STEP = 1.5;
const PAN_STEP = 0.15; // of what is in view
const MAX_ZOOM = 20000;

const heightOf = (track) => track.numRanks * Math.min(34, Math.max(9, Math.floor(420 / track.numRanks)));

function makeTimeline(data) {
  const element = document.getElementById("timeline");
  const tops = [];
  let bottom = 0;
  for (const track of data.tracks) {
    tops.push(bottom + NAME_PX);
    bottom += NAME_PX + heightOf(track);
  }
  element.style.height = `${bottom + AXIS_PX + SLIDER_PX}px`;
  const chart = echarts.init(element, null, { renderer: "canvas" });
  const timeline = {
    data, element, chart, tops,
    begin: 0, end: data.total, // what is in view
    palette: readPalette(), showPath: true,
    selected: null, // {track, node}
    cursor: 0, // time at which the keyboard goes from rank to rank
    outlines: [],
  };
  chart.setOption(timelineOption(timeline));
  chart.on("datazoom", () => {
    drawOutlines(timeline);
    hideTip();
  });
  addNames(timeline);
  addMouse(timeline);
  addKeys(timeline);
  return timeline;
}

function timelineOption(timeline) {
  const { data, palette, tops } = timeline;
  const all = data.tracks.map((_, index) => index);
  const zoom = { xAxisIndex: all, filterMode: "none", throttle: 0, minSpan: 100 / MAX_ZOOM };
  const text = { color: palette.muted, fontFamily: palette.font, fontSize: 12 };
  return {
    animation: false,
    grid: all.map((i) => ({ left: LEFT_PX, right: RIGHT_PX, top: tops[i], height: heightOf(data.tracks[i]), outerBoundsMode: "none" })),
    xAxis: all.map((i) => ({
      gridIndex: i, type: "value", min: 0, max: data.total, axisLine: { show: false }, axisTick: { show: false },
      splitLine: { lineStyle: { color: palette.rule } },
      axisLabel: {
        ...text, show: i === all.length - 1, hideOverlap: true, showMaxLabel: false,
        // The first is where the view begins, a crooked number except at 0.
        formatter: (time, index) => (index === 0 && time > 0 ? "" : `${time.toLocaleString("en", { maximumFractionDigits: 9 })} ${data.unit}`),
      },
    })),
    yAxis: all.map((i) => ({
      gridIndex: i, type: "category", inverse: true, data: Array.from({ length: data.tracks[i].numRanks }, (_, rank) => `${rank}`),
      axisLine: { show: false }, axisTick: { show: false }, axisLabel: { ...text, formatter: (rank) => `rank ${rank}` },
    })),
    dataZoom: [
      { type: "inside", ...zoom, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, moveOnMouseMove: true, preventDefaultMouseMove: false },
      {
        type: "slider", ...zoom, left: LEFT_PX, right: RIGHT_PX, bottom: 2, height: 16, showDataShadow: false, showDetail: false,
        brushSelect: false, borderColor: palette.rule, backgroundColor: palette.lane, fillerColor: `${palette.muted}33`,
        handleStyle: { color: palette.raised, borderColor: palette.muted }, moveHandleSize: 0,
        emphasis: { handleStyle: { color: palette.raised, borderColor: palette.ink } },
      },
    ],
    series: all.map((i) => ({
      type: "custom", xAxisIndex: i, yAxisIndex: i, data: [[0, 0]], clip: true, silent: true,
      renderItem: (params, api) => renderTrack(timeline, i, params.coordSys, api),
    })),
  };
}

function renderTrack(timeline, index, plot, api) {
  const { total } = timeline.data;
  const origin = api.coord([0, 0])[0];
  const pixelsPerUnit = (api.coord([total, 0])[0] - origin) / total;
  timeline.begin = (plot.x - origin) / pixelsPerUnit;
  timeline.end = timeline.begin + plot.width / pixelsPerUnit;
  timeline.element.dataset.begin = timeline.begin;
  timeline.element.dataset.end = timeline.end;
  const view = {
    begin: timeline.begin, end: timeline.end, left: plot.x, right: plot.x + plot.width,
    toX: (time) => origin + time * pixelsPerUnit,
  };
  return drawTrack(timeline.data.tracks[index], plot, view, timeline.palette, timeline.showPath);
}

function redrawTimeline(timeline) {
  timeline.palette = readPalette();
  timeline.chart.setOption(timelineOption(timeline));
  drawOutlines(timeline);
}

function addNames(timeline) {
  timeline.data.tracks.forEach((track, index) => {
    const label = make("div", "track-name");
    label.style.top = `${timeline.tops[index] - 29}px`;
    label.append(make("b", "", track.name), make("span", "", formatTime(timeline.data, track.makespan)));
    label.append(make("span", "", `bubble ${formatRatio(track.bubbleRatio)}`));
    timeline.element.append(label);
  });
}

const middleOf = ({ track, node }) => (track.start[node] + track.end[node]) / 2;
const plotWidth = (timeline) => timeline.chart.getWidth() - LEFT_PX - RIGHT_PX;
const pixelsPerUnit = (timeline) => plotWidth(timeline) / (timeline.end - timeline.begin);

function showRange(timeline, begin, end) {
  const total = timeline.data.total;
  const span = Math.min(Math.max(end - begin, total / MAX_ZOOM), total);
  const from = Math.min(Math.max(begin, 0), total - span);
  timeline.chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue: from, endValue: from + span });
}

function zoomBy(timeline, factor) {
  const { begin, end, selected } = timeline;
  // About the selected action if it is in view, else about the middle.
  const of = selected && middleOf(selected);
  const centre = selected && of > begin && of < end ? of : (begin + end) / 2;
  showRange(timeline, centre - (centre - begin) / factor, centre + (end - centre) / factor);
}

const panBy = (timeline, share) => {
  const step = share * (timeline.end - timeline.begin);
  showRange(timeline, timeline.begin + step, timeline.end + step);
};

const showAll = (timeline) => showRange(timeline, 0, timeline.data.total);

// The action under a point of the chart: {track, node}, or null.
function actionAt(timeline, x, y) {
  if (x < LEFT_PX || x > timeline.chart.getWidth() - RIGHT_PX) return null;
  const time = timeline.begin + (x - LEFT_PX) / pixelsPerUnit(timeline);
  for (const [index, track] of timeline.data.tracks.entries()) {
    const rank = Math.floor((y - timeline.tops[index]) / (heightOf(track) / track.numRanks));
    if (y < timeline.tops[index] || rank >= track.numRanks) continue;
    const node = nodeAt(track, rank, time, 2 / pixelsPerUnit(timeline));
    return node < 0 ? null : { track, node };
  }
  return null;
}

// Where an action lies in the chart, in pixels; null if it is out of view.
function boxOf(timeline, { track, node }) {
  const scale = pixelsPerUnit(timeline);
  const index = timeline.data.tracks.indexOf(track);
  const rows = rowsOf(track, timeline.tops[index], heightOf(track));
  const left = Math.max(LEFT_PX, LEFT_PX + (track.start[node] - timeline.begin) * scale);
  const right = Math.min(LEFT_PX + plotWidth(timeline), LEFT_PX + (track.end[node] - timeline.begin) * scale);
  if (right < LEFT_PX || left > LEFT_PX + plotWidth(timeline)) return null;
  return { left, width: Math.max(right - left, 3), top: rows.barTop(track.rankOfNode[node]), height: rows.barHeight };
}

// Frames the selected action, and the same action in the other tracks.
function drawOutlines(timeline) {
  timeline.outlines.forEach((outline) => outline.remove());
  timeline.outlines = [];
  const { selected, data } = timeline;
  if (!selected) return;
  for (const track of data.tracks) {
    const node = track === selected.track ? selected.node : twinOf(selected.track, selected.node, track);
    const box = node < 0 ? null : boxOf(timeline, { track, node });
    if (!box) continue;
    const outline = make("div", track === selected.track ? "outline" : "outline twin");
    const edge = (value) => `${value}px`;
    Object.assign(outline.style, {
      left: edge(box.left - 1), top: edge(box.top - 1), width: edge(box.width + 2), height: edge(box.height + 2),
    });
    timeline.element.append(outline);
    timeline.outlines.push(outline);
  }
}

function select(timeline, selected) {
  const before = timeline.selected;
  if (before && selected && before.track === selected.track && before.node === selected.node) return;
  timeline.selected = selected;
  drawOutlines(timeline);
}

function showActionTip(timeline, { track, node }, clientX, clientY) {
  const heading = `${actionText(track, node)}`;
  showTip(heading, `${KIND_NAMES[track.kind[node]]}, ${track.name}`, describe(timeline.data, track, node), remarks(track, node), clientX, clientY);
}

function addMouse(timeline) {
  const { element, chart } = timeline;
  const surface = chart.getZr();
  surface.on("mousemove", ({ offsetX, offsetY, event }) => {
    const hit = event.buttons ? null : actionAt(timeline, offsetX, offsetY);
    select(timeline, hit);
    if (!hit) return hideTip();
    timeline.cursor = middleOf(hit);
    showActionTip(timeline, hit, event.clientX, event.clientY);
  });
  surface.on("globalout", () => {
    select(timeline, null);
    hideTip();
  });
  // The library keeps every turn of the wheel from the page, also those that it does not use.
  const passBy = (event) => !event.ctrlKey && event.stopPropagation();
  element.addEventListener("wheel", passBy, { capture: true, passive: true });
  element.addEventListener("dblclick", () => showAll(timeline));
  document.getElementById("zoom-in").addEventListener("click", () => zoomBy(timeline, ZOOM_STEP));
  document.getElementById("zoom-out").addEventListener("click", () => zoomBy(timeline, 1 / ZOOM_STEP));
  document.getElementById("zoom-reset").addEventListener("click", () => showAll(timeline));
  document.getElementById("show-path").addEventListener("change", () => togglePath(timeline));
  document.getElementById("help-button").addEventListener("click", () => toggleHelp());
}
