// The layout of the timeline: a lane for each step, a slot for each call, aligned from lane to lane.
// A call that only some steps have gets a slot of its own, beside the call it came after. Calls are in the order in which
// they end: a module that goes wrong because of a call inside of it comes behind that call.

import type { Calls } from "./calls";
import { keyOf, type Table } from "./columns";
import type { Marks } from "./marks";
import { badness, type Metric } from "./metrics";

export interface Lane {
  readonly step: number;
  readonly micro: number;
  readonly rank: number;
}

export interface Grid {
  readonly lanes: readonly Lane[];
  readonly slots: number;
  /** For each call: its lane, its slot, its worst mark. */
  readonly lane: Uint32Array;
  readonly slot: Uint32Array;
  readonly worst: Uint8Array;
  /** Where another phase begins: [slot, phase]. */
  readonly phases: readonly (readonly [number, string])[];
}

export function layOut(table: Table, marks: Marks, calls: Calls): Grid {
  const { lanes, lane } = laneOfCalls(table, calls);
  const { slots, slot } = slotOfCalls(table, calls, lane, lanes.length);
  const worst = new Uint8Array(calls.count);
  for (let call = 0; call < calls.count; call++) {
    worst[call] = marks.codes[calls.first(call)]!;
    for (const row of calls.rows(call)) worst[call] = marks.worse(worst[call]!, marks.codes[row]!);
  }
  return { lanes, slots, lane, slot, worst, phases: phaseBorders(table, calls, slot, slots) };
}

/** For each call the most that a row of it is off by a metric; NaN where nothing was measured. */
export function errorsOf(table: Table, calls: Calls, metric: Metric): Float64Array {
  const most = new Float64Array(calls.count).fill(NaN);
  const off = badness(table, metric);
  for (let row = 0; row < table.rows; row++) {
    const [call, error] = [calls.of(row), off(row)];
    if (!(error <= most[call]!) && !Number.isNaN(error)) most[call] = error;
  }
  return most;
}

function laneOfCalls(table: Table, calls: Calls) {
  const numbers = new Map<number | string, number>();
  const keyed = keyOf(table, ["step", "micro", "rank"]);
  const found: Lane[] = [];
  const lane = new Uint32Array(calls.count);
  for (let call = 0; call < calls.count; call++) {
    const row = calls.first(call);
    const key = keyed(row);
    let number = numbers.get(key);
    if (number === undefined) {
      numbers.set(key, (number = found.length));
      found.push({ step: table.raw("step", row), micro: table.raw("micro", row), rank: table.raw("rank", row) });
    }
    lane[call] = number;
  }
  const order = found.map((_, at) => at).sort((a, b) => byTime(found[a]!, found[b]!));
  const place = new Uint32Array(order.length);
  order.forEach((number, at) => (place[number] = at));
  return { lanes: order.map((number) => found[number]!), lane: lane.map((number) => place[number]!) };
}

function byTime(a: Lane, b: Lane): number {
  return a.step - b.step || a.micro - b.micro || a.rank - b.rank || 0;
}

function slotOfCalls(table: Table, calls: Calls, lane: Uint32Array, lanes: number) {
  const keyed = keyOf(table, ["site", "phase", "kind", "recompute", "call"]);
  const numbers = new Map<number | string, number>();
  const after: number[] = []; // a linked list: which slot follows which; the head is at −1
  const numbered = new Uint32Array(calls.count);
  const latest = new Int32Array(lanes).fill(-1); // of each lane
  let head = -1;
  for (const call of calls.byEnd()) {
    const key = keyed(calls.first(call));
    const before = latest[lane[call]!]!;
    let number = numbers.get(key);
    if (number === undefined) {
      numbers.set(key, (number = after.length));
      after.push(before < 0 ? head : after[before]!);
      if (before < 0) head = number;
      else after[before] = number;
    }
    numbered[call] = latest[lane[call]!] = number;
  }
  const place = new Uint32Array(after.length);
  for (let number = head, at = 0; number >= 0; number = after[number]!) place[number] = at++;
  return { slots: after.length, slot: numbered.map((number) => place[number]!) };
}

/** The phases along the slots, if they form few stretches; many short ones cannot be labelled. */
function phaseBorders(table: Table, calls: Calls, slot: Uint32Array, slots: number): [number, string][] {
  const phase = new Array<string>(slots).fill("");
  for (let call = 0; call < calls.count; call++) phase[slot[call]!] ||= table.word("phase", calls.first(call)) ?? "";
  const borders: [number, string][] = [];
  phase.forEach((word, at) => {
    if (at === 0 || word !== phase[at - 1]) borders.push([at, word]);
  });
  return borders.length <= 8 ? borders : [];
}
