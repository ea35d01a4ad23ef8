// Loss and phase over steps.

function makeSteps(data) {
  if (!data.runs.length) return null;
  document.getElementById("steps-section").hidden = false;
  const element = document.getElementById("steps");
  element.style.height = "340px";
  const chart = echarts.init(element, null, { renderer: "canvas" });
  const redraw = () => chart.setOption(stepsOption(data.runs, chart.getWidth() - LEFT_PX - RIGHT_PX), true);
  redraw();
  return { chart, redraw, resized: redraw };
}

function stepsOption(runs, width) {
  const palette = readPalette();
  const text = { color: palette.muted, fontFamily: palette.font, fontSize: 12 };
  // Told apart by dash as well as by colour.
  const looks = [
    [palette.muted, "solid"], [palette["backward-live"], "solid"], [palette["weight-live"], [6, 3]], [palette.input, [2, 3]], [palette.ink, [8, 3, 2, 3]],
  ];
  const series = runs.flatMap((run, index) => {
    const [colour, type] = looks[index % looks.length];
    const points = (values) => run.step.map((step, at) => [step, values[at]]).filter((point) => point[1] !== null);
    return [
      { type: "line", name: run.name, data: points(run.loss), symbol: "none", sampling: "lttb", lineStyle: { color: colour, width: 1.75, type }, itemStyle: { color: colour } },
      {
        type: "line", name: `${run.name}, validation`, data: points(run.validation_loss), symbolSize: 7, symbol: "circle",
        lineStyle: { color: colour, width: 1, type: "dotted" }, itemStyle: { color: palette.page, borderColor: colour, borderWidth: 2 },
      },
    ].filter((each) => each.data.length);
  });
  // The phases of the run that has most of them: the one that freezes.
  const phased = runs.reduce((most, run) => (run.phases.length > most.phases.length ? run : most));
  const steps = runs.flatMap((run) => run.step);
  const pixelsPerStep = width / Math.max(1, steps.reduce((a, b) => Math.max(a, b)) - steps.reduce((a, b) => Math.min(a, b)));
  if (series.length) series[0].markArea = phaseBands(phased.phases, pixelsPerStep, palette, text);
  return {
    animation: false,
    grid: { left: LEFT_PX, right: RIGHT_PX, top: 72, bottom: 44, outerBoundsMode: "none" },
    legend: { left: 0, top: 0, itemGap: 24, itemWidth: 26, textStyle: { ...text, fontSize: 13 }, selectedMode: false },
    xAxis: { type: "value", name: "step", nameLocation: "middle", nameGap: 26, nameTextStyle: text, min: "dataMin", max: "dataMax", minInterval: 1, splitLine: { show: false }, axisTick: { show: false }, axisLine: { lineStyle: { color: palette.rule } }, axisLabel: { ...text, hideOverlap: true } },
    yAxis: { type: "value", scale: true, name: "loss", nameLocation: "middle", nameGap: 42, nameTextStyle: text, axisTick: { show: false }, splitLine: { lineStyle: { color: palette.rule } }, axisLabel: text },
    tooltip: {
      trigger: "axis", confine: true, backgroundColor: palette.raised, borderColor: palette.rule, textStyle: { color: palette.ink, fontFamily: palette.font, fontSize: 13 },
      axisPointer: { lineStyle: { color: palette.muted } }, formatter: (items) => stepTip(runs, items[0].axisValue),
    },
    series,
  };
}

// Every second band is shaded, and its name stands on a line of its own: neighbours have room for theirs.
function phaseBands(phases, pixelsPerStep, palette, text) {
  const bands = phases.map(([phase, first, last], index) => {
    const to = phases[index + 1] ? phases[index + 1][1] : last;
    const isWide = 2 * (to - first) * pixelsPerStep > LETTER_PX * phase.length;
    const label = { ...text, show: isWide, position: "top", distance: index % 2 ? 19 : 4 };
    return [{ name: phase.replaceAll("_", " "), xAxis: first, label, itemStyle: { opacity: index % 2 ? 0 : 1 } }, { xAxis: to }];
  });
  return { silent: true, itemStyle: { color: palette.lane }, data: bands };
}

function stepTip(runs, step) {
  const box = make("div");
  box.append(make("b", "", `Step ${step}`));
  for (const run of runs) {
    const at = run.step.indexOf(step);
    if (at < 0) continue;
    const words = [];
    if (run.loss[at] !== null) words.push(`loss ${run.loss[at].toPrecision(4)}`);
    if (run.validation_loss[at] !== null) words.push(`validation ${run.validation_loss[at].toPrecision(4)}`);
    if (run.step_time_s[at] !== null) words.push(`${run.step_time_s[at].toPrecision(3)} s`);
    if (run.freeze_ratio[at] !== null) words.push(`${formatRatio(run.freeze_ratio[at])} frozen`);
    const phase = run.phases.find(([, first, last]) => first <= step && step <= last);
    if (phase) words.push(phase[0]);
    box.append(make("div", "", `${run.name}: ${words.join(", ")}`));
  }
  return box;
}
