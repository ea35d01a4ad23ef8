// Puts the page together. What fails is said on the page: it may be read far from whoever wrote it.

async function main() {
  const data = await readData();
  const parts = [];
  if (data.tracks.length) {
    document.getElementById("timeline-section").hidden = false;
    showLegend(data);
    const timeline = makeTimeline(data);
    parts.push({ chart: timeline.chart, redraw: () => redrawTimeline(timeline), resized: () => drawOutlines(timeline) });
  }
  parts.push(...[makeHeat(data), makeSteps(data)].filter((part) => part !== null));
  makeTable(data);
  watchTheme(() => parts.forEach((part) => part.redraw()));
  new ResizeObserver(() => {
    for (const part of parts) {
      part.chart.resize();
      part.resized?.();
    }
  }).observe(document.querySelector("main"));
  document.documentElement.dataset.ready = "true";
}

// Only what occurs is explained.
function showLegend(data) {
  for (const item of document.querySelectorAll(".legend [data-kind]")) {
    item.hidden = !data.tracks.some((track) => track.kind.includes(item.dataset.kind));
  }
  const hasMark = {
    stages: (track) => track.numStages > track.numRanks, cut: (track) => track.cutHere.length,
    skipped: (track) => track.skipped.length, path: () => true,
  };
  for (const item of document.querySelectorAll(".legend [data-mark]")) {
    item.hidden = !data.tracks.some(hasMark[item.dataset.mark]);
  }
}

main().catch((error) => {
  const notice = document.getElementById("failure");
  notice.hidden = false;
  notice.textContent = `The page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
