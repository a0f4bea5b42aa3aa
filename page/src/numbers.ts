// How numbers are written: four significant digits, never seventeen.

import type { Numeric } from "./documents";

const SPECIAL = new Map([
  ["nan", "NaN"],
  ["inf", "∞"],
  ["-inf", "−∞"],
]);

/** A number in at most six characters or so: 0.2052, 37.24, 9.873e-4, 12,345. */
export function short(value: Numeric | undefined): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "string") return SPECIAL.get(value) ?? value;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return counted(value);
  if (size >= 1e3 && size < 1e5) return counted(Number(value.toPrecision(4)));
  if (size < 1e-3 || size >= 1e5) return signed(trimmed(value.toExponential(3)));
  return signed(String(Number(value.toPrecision(4))));
}

/** The number in full, for a tooltip. */
export function exact(value: Numeric | undefined): string {
  return value === null || value === undefined ? "" : String(value);
}

/** An error or a limit: two significant digits are enough to judge by. */
export function rough(value: number | null): string {
  if (value === null) return "–";
  if (value === 0 || !Number.isFinite(value)) return short(value);
  const size = Math.abs(value);
  return size >= 0.01 && size < 1000
    ? signed(String(Number(value.toPrecision(3))))
    : signed(value.toExponential(1).replace("e+", "e"));
}

/** How many times further off than can be explained. */
export function surprise(value: number | null): string {
  return value !== null && value >= 10 && value < 1e6 ? counted(value) : rough(value);
}

/** A cosine: near 1 its distance from 1 matters. */
export function cosine(value: number): string {
  const short4 = value.toFixed(4);
  return value < 1 && 1 - value < 1e-4 ? `1 − ${(1 - value).toExponential(1)}` : short4;
}

/** A difference carries its sign. */
export function difference(a: Numeric | undefined, b: Numeric | undefined): string {
  if (typeof a !== "number" || typeof b !== "number") return "";
  const gap = b - a;
  return gap === 0 ? "0" : (gap > 0 ? "+" : "") + short(gap);
}

/** 12345 → 12,345 */
export function counted(value: number): string {
  return signed(value.toLocaleString("en-US", { maximumFractionDigits: 0 }));
}

/** "1 row", "2,000 rows" */
export function plural(count: number, noun: string): string {
  return `${counted(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function trimmed(text: string): string {
  return text.replace(/\.?0+e/, "e").replace("e+", "e");
}

function signed(text: string): string {
  return text.replace(/^-/, "−");
}
