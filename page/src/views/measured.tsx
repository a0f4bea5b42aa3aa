// The measurements of a row: statistics of both sides, metrics between them, the worst elements, heat maps,
// histograms.

import type { Data } from "../data";
import type { Metric, Pair } from "../documents";
import { cosine, difference, exact, short } from "../numbers";
import { HeatMap } from "./heat";
import { HistogramsOf } from "./histogram";
import { Section } from "./panes";

export function Measured({ pair, comparing }: { pair: Pair; comparing: boolean }) {
  // Where only one side has values, they are shown as those of a run are.
  const both = comparing && (pair.histograms === null || Boolean(pair.histograms.a && pair.histograms.b));
  const [own, each] = [false, true].map((side) => pair.metrics.filter(({ name }) => OF_A_SIDE.test(name) === side));
  const mapped = pair.heat?.views.some((view) => view.values.some((value) => value !== null));
  return (
    <>
      {pair.statistics.length ? (
        <Section title="Statistics">
          <table class="numbers">
            <thead>
              <tr>
                <th />
                <th>{comparing ? "reference" : "value"}</th>
                {comparing ? <th>candidate</th> : null}
                {comparing ? <th>difference</th> : null}
              </tr>
            </thead>
            <tbody>
              {pair.statistics.map(({ name, a, b }) => (
                <tr key={name}>
                  <th>{name}</th>
                  <td title={exact(a)}>{short(a)}</td>
                  {comparing ? <td title={exact(b)}>{short(b)}</td> : null}
                  {comparing ? <td class="dim">{difference(a, b)}</td> : null}
                </tr>
              ))}
            </tbody>
          </table>
        </Section>
      ) : null}
      {pair.metrics.length ? (
        <Section title="Metrics">
          <Metrics metrics={own!} />
          {each!.length ? (
            <details class="more">
              <summary>of each side</summary>
              <Metrics metrics={each!} />
            </details>
          ) : null}
        </Section>
      ) : null}
      {pair.worst.length ? <Worst {...{ pair, comparing, both }} /> : null}
      {pair.heat && mapped ? (
        <Section title={both ? "Where the error sits" : "Where it is large"}>
          <HeatMap heat={pair.heat} of={both ? "|Δ|" : "|x|"} key={pair.row} />
        </Section>
      ) : null}
      {pair.histograms ? (
        <Section title="Histograms">
          <HistogramsOf histograms={pair.histograms} />
        </Section>
      ) : null}
    </>
  );
}

/** What the statistics say already, but for a few more. */
const OF_A_SIDE = /_(reference|candidate|difference)$/;

function Metrics({ metrics }: { metrics: readonly Metric[] }) {
  return (
    <dl class="metrics">
      {metrics.map(({ name, value, text, help }) => (
        <div key={name} title={help ?? undefined}>
          <dt>{name.replaceAll("_", " ")}</dt>
          <dd title={exact(value)}>
            {name === "cosine" && typeof value === "number"
              ? cosine(value)
              : value === null
                ? (text ?? "–")
                : short(value)}
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Worst({ pair, comparing, both }: { pair: Pair; comparing: boolean; both: boolean }) {
  return (
    <Section
      title={both ? "Worst elements" : "Largest elements"}
      aside={pair.values === "sample" ? "of a sample" : undefined}
    >
      <div class="scrolling">
        <table class="numbers" data-test="worst">
          <thead>
            <tr>
              <th>index</th>
              <th>{comparing ? "reference" : "value"}</th>
              {comparing ? <th>candidate</th> : null}
              {comparing ? <th>difference</th> : null}
            </tr>
          </thead>
          <tbody>
            {pair.worst.map((element) => (
              <tr key={element.index.join()}>
                <th>[{element.index.join(", ")}]</th>
                <td>{short(element.a)}</td>
                {comparing ? <td>{short(element.b)}</td> : null}
                {comparing ? <td>{short(element.difference)}</td> : null}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

/** The cells of the table, where there is no detail. */
export function FromTable({ data, row }: { data: Data; row: number }) {
  const { table } = data;
  const names = ["error", "surprise", "deviation", "limit", "given", "cosine", "max_abs", "relative_l2"].filter(
    (name) => table.number(name, row) !== null,
  );
  if (!names.length) return null;
  return (
    <Section title="Metrics">
      <Metrics metrics={names.map((name) => ({ name, value: table.number(name, row) }))} />
    </Section>
  );
}
