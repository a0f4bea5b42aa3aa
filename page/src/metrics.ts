// The metric by which the page filters, sorts, colours and chooses the worst rows.

import type { Table } from "./columns";
import type { Marks } from "./marks";

export interface Metric {
  /** Its column. */
  readonly name: string;
  readonly title: string;
  readonly help: string;
  /** Whether 1 is right and less is worse, as for a cosine; else 0 is right and more is worse. */
  readonly similarity: boolean;
}

const KNOWN: readonly (readonly [string, string, string])[] = [
  ["error", "error", "How far the two are apart, relative"],
  ["relative_l2", "rel. L2", "‖c − r‖ / ‖r‖"],
  ["max_abs", "max |Δ|", "The largest difference of two elements (AE)"],
  ["metric:mean_abs", "mean |Δ|", "The mean difference of two elements (L1, MAE)"],
  ["rmse", "RMSE", "The root of the mean of squared differences"],
  ["mape", "MAPE", "The mean of |c − r| / |r|, as a fraction"],
  ["cosine", "cosine", "1 is the same direction"],
];

const OWN = "metric:";

/** The metrics that a table has: the usual ones, then the comparison's custom metrics. */
export function metricsOf(table: Table): Metric[] {
  const known = KNOWN.map(([name]) => name);
  const own = table.names().filter((name) => name.startsWith(OWN) && !known.includes(name));
  return [
    ...KNOWN.map(([name, title, help]) => ({ name, title, help, similarity: name === "cosine" })),
    ...own.map((name) => ({ name, title: name.slice(OWN.length), help: "Asked for by name", similarity: false })),
  ].filter(({ name }) => table.has(name));
}

/** The metric of a name, or the error where there is no such metric. */
export function metricOf(table: Table, name: string): Metric {
  const all = metricsOf(table);
  return all.find((metric) => metric.name === name) ?? all[0] ?? { ...NONE };
}

const NONE: Metric = { name: "error", title: "error", help: "", similarity: false };

/** How bad each row is by a metric: 0 is right, NaN is not measured. */
export function badness(table: Table, metric: Metric): (row: number) => number {
  const values = table.find(metric.name)?.values;
  if (!values) return () => NaN;
  return metric.similarity ? (row) => 1 - values[row]! : (row) => values[row]!;
}

/** Marks of rows that no number describes: they are shown whatever the threshold is. */
export const BEYOND_NUMBERS: readonly string[] = ["non-finite", "shape", "dtype"];

/** Whether a row reaches the threshold, or has a mark that no number describes. */
export function atLeast(table: Table, marks: Marks, metric: Metric, least: number): (row: number) => boolean {
  const values = table.find(metric.name)?.values;
  const always = marks.kinds.map(({ word }) => BEYOND_NUMBERS.includes(word));
  const beyond = (value: number): boolean => (metric.similarity ? value <= least : value >= least);
  return (row) => always[marks.codes[row]!]! || (values !== undefined && beyond(values[row]!));
}

/** Its name in the reports. */
export function reportName(name: string): string {
  return name === "relative_l2" ? "rel_l2" : name.startsWith(OWN) ? name.slice(OWN.length) : name;
}
