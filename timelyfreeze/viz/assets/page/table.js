// The actions as a table, one rank at a time, made when it is opened or chosen.
function makeTable(data) {
  if (!data.tracks.length) return;
  document.getElementById("table-section").hidden = false;
  const [trackChoice, rankChoice] = [document.getElementById("table-track"), document.getElementById("table-rank")];
  const details = document.getElementById("actions");
  data.tracks.forEach((track, index) => trackChoice.append(new Option(track.name, index)));
  const fillRanks = () => {
    const { numRanks } = data.tracks[trackChoice.value];
    const kept = Math.min(rankChoice.value || 0, numRanks - 1);
    rankChoice.replaceChildren(...Array.from({ length: numRanks }, (_, rank) => new Option(`${rank}`, rank)));
    rankChoice.value = kept;
  };
  const fill = () => details.open && fillTable(data, data.tracks[trackChoice.value], Number(rankChoice.value));
  fillRanks();
  details.addEventListener("toggle", fill);
  rankChoice.addEventListener("change", fill);
  trackChoice.addEventListener("change", () => {
    fillRanks();
    fill();
  });
}

function fillTable(data, track, rank) {
  const row = (tag, texts) => {
    const line = make("tr");
    texts.forEach((text) => line.append(make(tag, "", `${text}`)));
    return line;
  };
  const heads = ["Action", "Kind", "Stage", "Micro-batch", "Start", "Duration", ...(track.measured ? ["Measured"] : []), "Freeze ratio", "Remarks"];
  const [head, body] = [make("thead"), make("tbody")];
  head.append(row("th", heads));
  for (let node = track.firstOfRank[rank]; node < track.firstOfRank[rank + 1]; node++) {
    const measured = track.measured ? [Number.isNaN(track.measured[node]) ? "–" : formatTime(data, track.measured[node])] : [];
    body.append(
      row("td", [
        actionText(track, node), KIND_NAMES[track.kind[node]], track.stage[node], track.microbatch[node],
        formatTime(data, track.start[node], 6), formatTime(data, track.end[node] - track.start[node]), ...measured,
        Number.isNaN(track.ratio[node]) ? "–" : formatRatio(track.ratio[node]), remarks(track, node).join(", "),
      ]),
    );
  }
  document.getElementById("action-table").replaceChildren(head, body);
}
