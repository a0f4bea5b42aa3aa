// Details of rows, loaded on demand; the last few are cached, so that going back and forth is immediate.

import { useEffect, useState } from "preact/hooks";
import type { Data } from "./data";
import type { Pair } from "./documents";

/** A detail (null where the source has none), or the error that prevented it. */
export type Answer = { row: number; pair: Pair | null } | { row: number; problem: string };

const KEPT = 60;
const held = new WeakMap<Data, Map<number, Pair | null>>();

async function ask(data: Data, row: number): Promise<Pair | null> {
  const known = held.get(data) ?? new Map<number, Pair | null>();
  held.set(data, known);
  if (!known.has(row)) {
    known.set(row, await data.source.pair(row));
    if (known.size > KEPT) known.delete(known.keys().next().value!);
  }
  return known.get(row) ?? null;
}

/** The detail of a row; null while it is loading. */
export function usePair(data: Data, row: number): Answer | null {
  const [answer, setAnswer] = useState<Answer | null>(null);
  useEffect(() => {
    let current = true;
    ask(data, row).then(
      (pair) => current && setAnswer({ row, pair }),
      (error: unknown) =>
        current && setAnswer({ row, problem: error instanceof Error ? error.message : String(error) }),
    );
    return () => {
      current = false;
    };
  }, [data, row]);
  return answer?.row === row ? answer : null;
}
