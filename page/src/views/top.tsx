// The bar at the top: the runs, the actions on them, and the theme.

import { useState } from "preact/hooks";
import { csvOf, download } from "../csv";
import type { Data } from "../data";
import type { RunFacts, Session } from "../documents";
import { expression, order } from "../filter";
import { metricOf, reportName } from "../metrics";
import type { Go, View } from "../route";
import type { Selection } from "../selection";
import { choose, chosenTheme, type Theme } from "../theme";

interface Props {
  session: Session;
  data: Data | null;
  selection: Selection | null;
  view: View;
  go: Go;
  onHelp: () => void;
}

const THEMES: readonly Theme[] = ["system", "light", "dark"];

export function Top({ session, data, selection, view, go, onHelp }: Props) {
  const [theme, setTheme] = useState(chosenTheme);
  const named = (id: string | null) => session.runs.find((run) => run.id === id) ?? null;
  const [reference, candidate] = [named(session.reference), named(session.candidate)];
  const turn = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
    choose(next);
    setTheme(next);
  };
  return (
    <header class="top">
      <span class="brand" title={`astray ${session.version}`}>
        astray
      </span>
      <span class="top-runs">
        {reference ? <RunName run={reference} title={candidate ? "reference" : "run"} /> : null}
        {candidate ? (
          <>
            <span class="dim" aria-label="compared with">
              →
            </span>
            <RunName run={candidate} title="candidate" />
          </>
        ) : null}
      </span>
      <span class="grow" />
      {data && selection ? <Exports {...{ data, selection, view }} /> : null}
      {session.mode === "live" ? (
        <button type="button" onClick={() => go({ place: "choose", row: null })} aria-pressed={view.place === "choose"}>
          Choose runs…
        </button>
      ) : null}
      <button type="button" onClick={turn} title="Colours: as the system has them, light, or dark" data-test="theme">
        {theme === "system" ? "◐ auto" : theme === "light" ? "○ light" : "● dark"}
      </button>
      <button type="button" onClick={onHelp} title="Keys and marks (?)" aria-label="Help">
        ?
      </button>
    </header>
  );
}

function RunName({ run, title }: { run: RunFacts; title: string }) {
  const [open, setOpen] = useState(false);
  return (
    <span class="run-name" onMouseLeave={() => setOpen(false)}>
      <button
        type="button"
        class="quiet"
        title={`${title}: ${run.path}`}
        aria-expanded={open}
        onClick={() => setOpen(!open)}
      >
        <bdi>{run.label}</bdi>
      </button>
      {open ? (
        <div class="popup">
          <p>
            <b>{title}</b> <span class="dim wrapped">{run.path}</span>
          </p>
          <dl class="facts">
            {run.facts.map(([name, value], at) => (
              <div key={at}>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
          {run.problems.map((problem) => (
            <p key={problem} class="problem">
              {problem}
            </p>
          ))}
        </div>
      ) : null}
    </span>
  );
}

/** The export of the table. A server writes all columns, a one-file report those that it has. */
function Exports({ data, selection, view }: { data: Data; selection: Selection; view: View }) {
  const { source, table, comparing } = data;
  if (source.exportAddress && comparing) {
    const conclusion = view.conclusion ? reportName(metricOf(table, view.metric).name) : "";
    const address = (kind: "csv" | "xlsx") =>
      source.exportAddress!(kind, expression(view, table), order(view), conclusion);
    return (
      <>
        <a class="button" href={address("csv")} download title="The rows of the table as CSV">
          CSV
        </a>
        <a class="button" href={address("xlsx")} download title="The rows of the table as a workbook">
          xlsx
        </a>
      </>
    );
  }
  return (
    <button
      type="button"
      title="The rows of the table as CSV"
      onClick={() => download(comparing ? "pairs.csv" : "run.csv", csvOf(table, selection.rows))}
    >
      CSV
    </button>
  );
}
