// The heat map of freeze ratios by stage and micro-batch, with the stairs of the cuts.

const MARGIN = { top: 6, bottom: 46 };
const cellHeight = (numStages) => Math.min(26, Math.max(5, Math.floor(360 / numStages)));

function makeHeat(data) {
  const tracks = data.tracks.filter((track) => track.ratio.some((ratio) => !Number.isNaN(ratio)));
  if (!tracks.length) return null;
  document.getElementById("heat-section").hidden = false;
  const choice = document.getElementById("heat-track");
  tracks.forEach((track, index) => choice.append(new Option(track.name, index)));
  document.getElementById("heat-choice").hidden = tracks.length < 2;
  const chosen = () => tracks[choice.value];
  const element = document.getElementById("heat");
  const fit = () => (element.style.height = `${chosen().numStages * cellHeight(chosen().numStages) + MARGIN.top + MARGIN.bottom}px`);
  fit();
  const chart = echarts.init(element, null, { renderer: "canvas" });
  const redraw = () => {
    fit();
    chart.resize();
    chart.setOption(heatOption(chosen()), true);
  };
  choice.addEventListener("change", redraw);
  const surface = chart.getZr();
  surface.on("mousemove", ({ offsetX, offsetY, event }) => showCellTip(chosen(), chart, offsetX, offsetY, event));
  surface.on("globalout", hideTip);
  redraw();
  return { chart, redraw };
}

function heatOption(track) {
  const palette = readPalette();
  const text = { color: palette.muted, fontFamily: palette.font, fontSize: 12 };
  const axis = (count, name, interval) => ({
    type: "category", data: Array.from({ length: count }, (_, index) => `${index}`), name, nameLocation: "middle", nameTextStyle: text,
    axisLine: { show: false }, axisTick: { show: false }, axisLabel: { ...text, interval },
  });
  return {
    animation: false,
    grid: { left: LEFT_PX, right: RIGHT_PX, ...MARGIN, outerBoundsMode: "none" },
    xAxis: { ...axis(track.numMicrobatches, "micro-batch", "auto"), nameGap: 26 },
    yAxis: { ...axis(track.numStages, "stage", Math.ceil(16 / cellHeight(track.numStages)) - 1), inverse: true, nameGap: 36 },
    series: [
      {
        type: "custom", data: [[0, 0]], silent: true, clip: false,
        renderItem: (params) => ({ type: "group", silent: true, children: heatShapes(track, params.coordSys, palette) }),
      },
    ],
  };
}

function heatShapes(track, plot, palette) {
  const [width, height] = [plot.width / track.numMicrobatches, plot.height / track.numStages];
  const gap = width > 8 && height > 8 ? 1.5 : 0;
  const byShade = palette.backward.map(() => []);
  track.ratio.forEach((ratio, node) => {
    if (Number.isNaN(ratio)) return;
    const [x, y] = [plot.x + track.microbatch[node] * width, plot.y + track.stage[node] * height];
    byShade[Math.round(ratio * (NUM_SHADES - 1))].push(x + gap / 2, y + gap / 2, width - gap, height - gap);
  });
  const shapes = byShade.map((list, shade) => boxes(list, palette.backward[shade]));
  if (track.cuts && track.cutHere.length) shapes.push(cutStairs(track, plot, width, height, palette));
  return shapes;
}

// Stages above the line (with lower numbers) have no backward.
function cutStairs(track, plot, width, height, palette) {
  const points = track.cuts.flatMap((cut, microbatch) => [
    [plot.x + microbatch * width, plot.y + cut * height],
    [plot.x + (microbatch + 1) * width, plot.y + cut * height],
  ]);
  const lineWidth = height > 12 ? 2.5 : 1;
  return { type: "polyline", silent: true, shape: { points }, style: { stroke: palette.cut, lineWidth, fill: null } };
}

function showCellTip(track, chart, x, y, event) {
  const width = (chart.getWidth() - LEFT_PX - RIGHT_PX) / track.numMicrobatches;
  const microbatch = Math.floor((x - LEFT_PX) / width);
  const stage = Math.floor((y - MARGIN.top) / cellHeight(track.numStages));
  const node = track.ratio.findIndex((ratio, each) => !Number.isNaN(ratio) && track.stage[each] === stage && track.microbatch[each] === microbatch);
  if (node < 0) return hideTip();
  const rows = [["Stage", stage], ["Micro-batch", microbatch], ["Freeze ratio", formatRatio(track.ratio[node])]];
  showTip(actionText(track, node), track.name, rows, remarks(track, node), event.clientX, event.clientY);
}
