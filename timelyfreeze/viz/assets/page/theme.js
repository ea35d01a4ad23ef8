// Colours: all of them stand in page.css; scripts read them from there. The theme follows the system until it is chosen.

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
let chosenTheme = "auto";

function applyTheme() {
  const isDark = chosenTheme === "auto" ? systemIsDark.matches : chosenTheme === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  themeButton.textContent = `Theme: ${chosenTheme}`;
}

function watchTheme(redraw) {
  const order = ["auto", "light", "dark"];
  themeButton.addEventListener("click", () => {
    chosenTheme = order[(order.indexOf(chosenTheme) + 1) % order.length];
    applyTheme();
    redraw();
  });
  systemIsDark.addEventListener("change", () => {
    applyTheme();
    redraw();
  });
}

const COLOURS = [
  "page", "raised", "lane", "rule", "ink", "muted", "accent", "forward", "input", "cut", "skipped", "on-light", "on-dark",
  "backward-live", "backward-frozen", "weight-live", "weight-frozen",
];
// Shades between live and frozen: more than the eye tells apart, few enough to draw bars of one shade together.
const NUM_SHADES = 21;

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const palette = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  palette.font = getComputedStyle(document.body).fontFamily;
  palette.backward = shades(palette["backward-live"], palette["backward-frozen"]);
  palette.weight = shades(palette["weight-live"], palette["weight-frozen"]);
  // By fill number, see fillOf().
  palette.fills = [palette.forward, palette.input, ...palette.backward, ...palette.weight];
  palette.fillChannels = palette.fills.map(channels);
  palette.labels = palette.fillChannels.map(([red, green, blue]) =>
    0.299 * red + 0.587 * green + 0.114 * blue > 140 ? palette["on-light"] : palette["on-dark"],
  );
  return palette;
}

const channels = (colour) => [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16));

function shades(live, frozen) {
  const [from, to] = [channels(live), channels(frozen)];
  return Array.from({ length: NUM_SHADES }, (_, step) => {
    const share = step / (NUM_SHADES - 1);
    const mixed = from.map((value, channel) => Math.round(value + (to[channel] - value) * share));
    return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
  });
}

// The number of an action's fill in palette.fills; an action without a ratio counts as all trained.
function fillOf(kind, ratio) {
  if (kind === "F") return 0;
  if (kind === "I") return 1;
  const shade = Number.isNaN(ratio) ? 0 : Math.round(ratio * (NUM_SHADES - 1));
  return 2 + (kind === "W" ? NUM_SHADES : 0) + shade;
}

applyTheme();
