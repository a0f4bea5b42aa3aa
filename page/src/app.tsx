// The whole page: loads the session and its table, and lays out the answer, the timeline, the tree, the rows and one
// row's detail. While a comparison runs it polls the progress.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { load, type Data } from "./data";
import type { Session } from "./documents";
import { useKeys } from "./keyboard";
import { atRow, useView, type Go, type View } from "./route";
import { select, type Selection } from "./selection";
import type { Source } from "./source";
import { Choose } from "./views/choose";
import { Detail } from "./views/detail";
import { Filters } from "./views/filters";
import { Headline } from "./views/headline";
import { Help } from "./views/help";
import { State } from "./views/panes";
import { Progress } from "./views/progress";
import { Rows } from "./views/rows";
import { Timeline } from "./views/timeline";
import { Top } from "./views/top";
import { ModuleTree } from "./views/tree";

const POLL = 400; // milliseconds between two requests about a running comparison

interface Loading {
  session: Session | null;
  data: Data | null;
  problem: string | null;
}

/** The session, and its table once there is one; `again` reloads both, after a comparison was started. */
function useSession(source: Source): Loading & { again: () => void } {
  const [state, setState] = useState<Loading>({ session: null, data: null, problem: null });
  const [asked, setAsked] = useState(0);
  const shown = useRef("");
  useEffect(() => {
    let [current, timer] = [true, 0];
    const ask = async () => {
      try {
        const session = await source.session();
        if (!current) return;
        const running = session.job.state === "running";
        const about = JSON.stringify([
          session.kind,
          session.reference,
          session.candidate,
          session.options,
          session.generation,
        ]);
        setState((held) => ({ ...held, session, problem: null }));
        if (!running && session.kind !== "choose" && shown.current !== about) {
          const data = await load(source, session);
          shown.current = about;
          if (current) setState({ session, data, problem: null });
        }
        if (running && current) timer = window.setTimeout(ask, POLL);
      } catch (error) {
        if (current) setState((held) => ({ ...held, problem: error instanceof Error ? error.message : String(error) }));
      }
    };
    void ask();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [source, asked]);
  return { ...state, again: () => setAsked((count) => count + 1) };
}

export function App({ source }: { source: Source }) {
  const { session, data, problem, again } = useSession(source);
  const [view, go] = useView();
  const [help, setHelp] = useState(false);
  const selection = useMemo(
    () => (data ? select(data.table, data.marks, view) : null),
    [
      data,
      view.site,
      view.epoch,
      view.step,
      view.rank,
      view.phase,
      view.verdict.join(),
      view.metric,
      view.least,
      view.q,
      view.sort,
      view.conclusion,
    ],
  );
  useKeys({
    "?": () => setHelp(!help),
    Escape: () =>
      help ? setHelp(false) : view.place === "overview" ? undefined : go({ place: "overview", row: null }),
  });
  // The form stays open until the comparison is done: what was typed is still there if it fails.
  const started = useRef(false);
  useEffect(() => {
    if (started.current) go({ place: "overview", row: null });
    started.current = false;
  }, [data]);
  useEffect(() => {
    if (session) document.title = titleOf(session);
  }, [session]);

  const running = session?.job.state === "running";
  const choosing = session?.mode === "live" && (view.place === "choose" || (session.kind === "choose" && !running));
  return (
    <div class="page">
      {session ? <Top {...{ session, data, selection, view, go }} onHelp={() => setHelp(true)} /> : null}
      {session ? <Progress job={session.job} source={source} /> : null}
      <main>
        {problem ? (
          <State kind="error" title={problem}>
            <button type="button" onClick={again}>
              Try again
            </button>
          </State>
        ) : !session ? (
          <State kind="wait" title="Opening…" />
        ) : choosing ? (
          <Choose
            session={session}
            source={source}
            onStarted={() => {
              started.current = true;
              again();
            }}
          />
        ) : data && selection ? (
          <Look {...{ data, view, go, selection }} keys={!help} />
        ) : (
          <State kind="wait" title={running ? "Comparing…" : "Reading the table…"} />
        )}
      </main>
      {help ? <Help data={data} onClose={() => setHelp(false)} /> : null}
    </div>
  );
}

interface LookProps {
  data: Data;
  view: View;
  go: Go;
  selection: Selection;
  /** Whether it gets the keys, and not the element above it. */
  keys: boolean;
}

function Look({ data, view, go, selection, keys }: LookProps) {
  const { table, calls } = data;
  const row = view.row !== null && view.row < table.rows ? view.row : null;
  const chosen = useMemo(() => (row === null ? -1 : selection.rows.indexOf(row)), [selection, row]);

  /** To the row above or below in the table as it is; from outside of it, to its beginning. */
  const move = (by: -1 | 1) => {
    const next = chosen < 0 ? 0 : chosen + by;
    const target = selection.rows[next];
    if (target !== undefined) go(atRow(target), row === null ? "push" : "replace");
  };
  const walk = (direction: -1 | 1) => {
    const target = row === null ? data.first : calls.neighbour(row, direction);
    if (target !== null) go(atRow(target));
  };
  const bound = {
    ArrowUp: () => move(-1),
    ArrowDown: () => move(1),
    ArrowLeft: () => walk(-1),
    ArrowRight: () => walk(1),
    p: () => walk(-1),
    n: () => walk(1),
    "/": () => document.getElementById("search")?.focus(),
  };
  useKeys(keys ? bound : {});

  return (
    <>
      <Headline {...{ data, view, go }} />
      {view.row !== null && row === null ? (
        <State kind="empty" title={`There is no row ${view.row}: the table has ${table.rows}.`} />
      ) : null}
      <div class={`work ${row === null ? "" : "work-detail"}`}>
        <ModuleTree {...{ data, view, go }} />
        <div class="middle">
          <Timeline {...{ data, view, go, selection }} />
          <section class="pairs" aria-label="Rows">
            <Filters {...{ data, view, go, selection }} />
            <Rows {...{ data, view, go, selection, chosen }} />
          </section>
        </div>
        {row === null ? null : <Detail key={calls.of(row)} {...{ data, row, go }} />}
      </div>
    </>
  );
}

function titleOf(session: Session): string {
  const named = (id: string | null) => session.runs.find((run) => run.id === id)?.label;
  const runs = [named(session.reference), named(session.candidate)].filter(Boolean).join(" → ");
  return runs ? `${runs} – astray` : "astray";
}
