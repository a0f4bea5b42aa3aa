// The filters of the page in astray's own language of filters (docs/reference/reports.md), for what the server writes to files.

import type { Table } from "./columns";
import { BEYOND_NUMBERS, metricOf, reportName } from "./metrics";
import type { View } from "./route";

export function expression(view: View, table: Table): string {
  const parts: string[] = [];
  if (view.epoch && table.has("epoch")) parts.push(epoch(table, Number(view.epoch)));
  if (view.step) parts.push(steps(view.step));
  if (view.rank) parts.push(`rank == ${Number(view.rank)}`);
  if (view.phase) parts.push(`phase == ${quoted(view.phase)}`);
  if (view.verdict.length) parts.push(`verdict in (${view.verdict.map((word) => quoted(word)).join(", ")})`);
  if (view.least && !Number.isNaN(Number(view.least))) {
    const { name, similarity } = metricOf(table, view.metric);
    const always = BEYOND_NUMBERS.map((word) => quoted(word)).join(", ");
    const off = `${reportName(name)} ${similarity ? "<=" : ">="} ${Number(view.least)}`;
    parts.push(`(${off} or verdict in (${always}))`);
  }
  if (view.site) parts.push(inside(view.site));
  for (const word of view.q.split(/\s+/).filter(Boolean)) {
    const found = quoted(`(?i)${escaped(word)}`);
    parts.push(
      `(${["site", "type", "role", "path", "phase", "kind"].map((name) => `${name} ~ ${found}`).join(" or ")})`,
    );
  }
  return parts.filter(Boolean).join(" and ");
}

/** Columns whose names differ between the page and the reports. */
const RENAMED = new Map([
  ["dtype_a", "dtype_reference"],
  ["shape_a", "shape_reference"],
  ["epoch", "step"],
]);

/** The order of the page, as the reports call it. */
export function order(view: View): string {
  const name = view.sort.replace(/^-/, "");
  return (view.sort.startsWith("-") ? "-" : "") + (RENAMED.get(name) ?? reportName(name));
}

/** The steps of an epoch, which the reports number in one sequence. */
function epoch(table: Table, wanted: number): string {
  const [epochs, steps] = [table.column("epoch").values, table.column("step").values];
  let [low, high] = [Infinity, -Infinity];
  for (let row = 0; row < table.rows; row++) {
    if (epochs[row] !== wanted) continue;
    low = Math.min(low, steps[row]!);
    high = Math.max(high, steps[row]!);
  }
  return low <= high ? `${low} <= step <= ${high}` : "step < 0";
}

function steps(text: string): string {
  const ranges = text.split(",").map((part) => part.split(/[-–]/).map(Number));
  if (ranges.some((range) => range.some(Number.isNaN))) return "";
  return `(${ranges.map(([low, high]) => (high === undefined ? `step == ${low}` : `${low} <= step <= ${high}`)).join(" or ")})`;
}

function inside(site: string): string {
  return site === "<root>" ? "site !~ '^/'" : `site ~ ${quoted(`^${escaped(site)}($|[.:/])`)}`;
}

/** As a text of the language; it has no escapes, so a text with both quotes has any character in place of one. */
function quoted(text: string): string {
  return text.includes("'") ? `"${text.replaceAll('"', ".")}"` : `'${text}'`;
}

function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
}
