// The rows that are shown, as CSV, made in the browser: a one-file report has no server.

import type { Table } from "./columns";

const INTERNAL = new Set(["group", "parent"]);

export function csvOf(table: Table, rows: Uint32Array): string {
  const names = table.names().filter((name) => !INTERNAL.has(name));
  const lines = [names.join(",")];
  for (const row of rows) {
    const cells = names.map((name) => {
      const column = table.column(name);
      return column.words ? quoted(table.word(name, row) ?? "") : number(column.values[row]!);
    });
    lines.push(cells.join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
}

/** Six significant digits, as in the CSV of `astray compare`. */
function number(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));
}

/** How a text begins that a spreadsheet would run as a formula: a module of any name may be in a run. */
const FORMULA = /^[=+\-@\t\r]/;

function quoted(text: string): string {
  const plain = FORMULA.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** Downloads a text as a file. */
export function download(name: string, text: string): void {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
