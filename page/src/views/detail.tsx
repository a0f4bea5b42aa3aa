// Everything about one row: both sides' statistics, metrics, histograms, worst elements, where the error sits, the
// line of the program, and links: previous and next call, the calls that made the tensor and those that use it.

import { useMemo } from "preact/hooks";
import type { Data } from "../data";
import type { Pair } from "../documents";
import { placeOf, siteOf, tensorOf } from "../names";
import { rough, short, surprise } from "../numbers";
import { atRow, type Go } from "../route";
import { usePair } from "../pairs";
import { overSteps } from "../series";
import { OverSteps } from "./lines";
import { Sign, Verdict } from "./mark";
import { FromTable, Measured } from "./measured";
import { Origin } from "./origin";
import { Section, State } from "./panes";

export function Detail({ data, row, go }: { data: Data; row: number; go: Go }) {
  const { table, marks, calls } = data;
  const loaded = usePair(data, row);
  const pair = loaded && "pair" in loaded ? loaded.pair : null;
  const lines = <Lines {...{ data, row, go }} />;
  const [previous, next] = [calls.neighbour(row, -1), calls.neighbour(row, 1)];
  return (
    <aside class="detail" aria-label="Detail" data-test="detail" data-row={row}>
      <header class="detail-head">
        <div class="detail-title">
          <h2 title={siteOf(table, row)}>
            <bdi>{siteOf(table, row)}</bdi>
          </h2>
          <button
            type="button"
            class="quiet close"
            aria-label="Close"
            title="Close (Esc)"
            onClick={() => go({ place: "overview", row: null })}
          >
            ×
          </button>
        </div>
        <p class="detail-place">
          {[table.word("type", row), placeOf(table, row), tensorOf(table, row)].filter(Boolean).join(" · ")}
        </p>
        <div class="detail-verdict">
          <Verdict mark={marks.at(row)} />
          {data.comparing && table.number("error", row) !== null ? (
            <span>
              error <b>{rough(table.number("error", row))}</b>
              {table.number("surprise", row) === null ? null : (
                <span class="dim">, {surprise(table.number("surprise", row))} × what can be explained</span>
              )}
            </span>
          ) : null}
        </div>
        <nav class="walk" aria-label="Neighbouring calls">
          <Step data={data} row={previous} label="previous" keys="p" go={go} from={row} />
          <Step data={data} row={next} label="next" keys="n" go={go} from={row} />
        </nav>
      </header>
      <div class="detail-body">
        <div class="detail-flow">
          {loaded === null ? <State kind="wait" title="Looking at the tensors…" /> : null}
          {loaded && "problem" in loaded ? <State kind="error" title={loaded.problem} /> : null}
          {loaded && "pair" in loaded ? <Said pair={pair} data={data} row={row} /> : null}
          <ThisCall {...{ data, row, go }} />
          {data.comparing ? null : lines}
          {pair ? <Measured pair={pair} comparing={data.comparing} /> : null}
          {loaded && "pair" in loaded && !pair ? <FromTable data={data} row={row} /> : null}
          {data.comparing ? lines : null}
          {pair ? <Origin {...{ pair, go }} /> : null}
        </div>
      </div>
    </aside>
  );
}

function Step(props: { data: Data; row: number | null; label: string; keys: string; go: Go; from: number }) {
  const { data, row, label, keys, go, from } = props;
  const arrow = label === "previous" ? "←" : "→";
  if (row === null) {
    return (
      <button type="button" class="walk-step" disabled>
        <span class="dim">no {label} call</span>
      </button>
    );
  }
  const [stepFrom, step] = [data.table.raw("step", from), data.table.raw("step", row)];
  const phase = data.table.word("phase", row) ?? "";
  return (
    <button
      type="button"
      class={`walk-step walk-${label}`}
      data-test={label}
      title={`${siteOf(data.table, row)} (key ${keys})`}
      onClick={() => go(atRow(row))}
    >
      <span class="dim">
        {label === "previous" ? `${arrow} ` : ""}
        {label} call
        {step === stepFrom ? (phase === data.table.word("phase", from) ? "" : ` · ${phase}`) : ` · step ${step}`}
        {label === "next" ? ` ${arrow}` : ""}
      </span>
      <span class="walk-name">
        <Sign mark={data.marks.at(row)} /> <bdi>{siteOf(data.table, row)}</bdi>
      </span>
    </button>
  );
}

function Said({ pair, data, row }: { pair: Pair | null; data: Data; row: number }) {
  const reason = pair?.reason ?? data.table.word("reason", row);
  const lacking = pair
    ? pair.lacking
    : "This file holds the details of the rows around the first divergence and of the worst ones. Of this row it has what the table shows; `astray view` shows everything.";
  if (!reason && !lacking) return null;
  return (
    <div class="said">
      {reason ? <p>{reason}</p> : null}
      {lacking ? <p class="lacking">{lacking}</p> : null}
    </div>
  );
}

/** All tensors of the same call: what went in, what came out. */
function ThisCall({ data, row, go }: { data: Data; row: number; go: Go }) {
  const { table, calls, marks } = data;
  const rows = calls.rows(calls.of(row));
  return (
    <Section title="This call">
      <div class="call" role="listbox" aria-label="Tensors of this call">
        {[...rows].map((other) => (
          <button
            key={other}
            type="button"
            role="option"
            aria-selected={other === row}
            class="call-row"
            data-row={other}
            onClick={() => go(atRow(other))}
          >
            <Sign mark={marks.at(other)} />
            <span class="call-name" title={tensorOf(table, other)}>
              {tensorOf(table, other)}
            </span>
            <span class="dim call-form">
              {[
                table.word(data.comparing ? "dtype_a" : "dtype", other),
                table.word(data.comparing ? "shape_a" : "shape", other),
              ]
                .filter(Boolean)
                .join(" ")}
            </span>
            <span class="call-error">
              {data.comparing ? rough(table.number("error", other)) : short(table.number("absmax", other))}
            </span>
          </button>
        ))}
      </div>
    </Section>
  );
}

/** The same tensor in the other steps, if there are any. */
function Lines({ data, row, go }: { data: Data; row: number; go: Go }) {
  const rows = useMemo(() => overSteps(data.table, row), [data, row]);
  if (rows.length < 2) return null;
  return (
    <Section title={data.comparing ? "Error over steps" : "Over steps"}>
      <OverSteps {...{ data, row, rows, go }} />
    </Section>
  );
}
