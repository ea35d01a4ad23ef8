// Bundles charts.js to ../echarts.js, one minified script that defines `echarts`, headed by the licences of what is in it.
import { readFile } from "node:fs/promises";
import { build } from "esbuild";

const LICENCES = [
  "echarts/NOTICE",
  "echarts/LICENSE",
  "echarts/licenses/LICENSE-d3",
  "zrender/LICENSE",
  "tslib/LICENSE.txt",
];
const { version } = JSON.parse(await readFile("node_modules/echarts/package.json", "utf8"));
const texts = await Promise.all(
  LICENCES.map(async (path) => {
    const text = (await readFile(`node_modules/${path}`, "utf8")).trim().replaceAll("*/", "* /");
    return `---- ${path} ----\n\n${text.replaceAll(/[ \t\r]+$/gm, "")}`;
  }),
);
const head = `A build of Apache ECharts ${version} (echarts, with zrender and tslib), made with the bundle folder beside this file.`;

await build({
  entryPoints: ["charts.js"],
  outfile: "../echarts.js",
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "echarts",
  target: "es2020",
  legalComments: "none", // all of them are in the banner
  banner: { js: `/*!\n${head}\n\n${texts.join("\n\n\n")}\n*/` },
});
