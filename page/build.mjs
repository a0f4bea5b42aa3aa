// Bundles the page into one script and one style sheet, beside the Python package that serves them.
// The libraries inside keep their licences: they stand at the top of the script.
import { build } from "esbuild";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const bundled = ["preact", "uplot"];

const notices = bundled.map((name) => {
  const { version } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json"), "utf8"));
  const licence = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim();
  return `${name} ${version}\n\n${licence.replaceAll("*/", "* /")}`;
});

await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: process.argv[2] ?? "../src/astray/web/static",
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
  banner: { js: `/*! This file contains:\n\n${notices.join("\n\n")}\n*/` },
});
