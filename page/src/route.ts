// The state of the page in its address: a view can be sent as a link, and Back goes to the previous one.
// `#/pair/812?verdict=diverged&step=3&q=attn&sort=-error`

import { useEffect, useState } from "preact/hooks";

export interface View {
  readonly place: "overview" | "pair" | "choose";
  readonly row: number | null;
  /** A site and everything inside of it, as chosen in the tree. */
  readonly site: string;
  /** Of programs that count epochs. */
  readonly epoch: string;
  readonly step: string;
  readonly rank: string;
  readonly phase: string;
  readonly verdict: readonly string[];
  /** The metric; empty is the error. */
  readonly metric: string;
  /** Only rows that are at least so far off by the metric. */
  readonly least: string;
  readonly q: string;
  /** A column, with a minus for the largest first; empty is the order of execution. */
  readonly sort: string;
  /** One line for each site that is wrong. */
  readonly conclusion: boolean;
  /** What the timeline's colours mean. */
  readonly colour: "verdict" | "error";
}

export const BARE: View = {
  place: "overview",
  row: null,
  site: "",
  epoch: "",
  step: "",
  rank: "",
  phase: "",
  verdict: [],
  metric: "",
  least: "",
  q: "",
  sort: "",
  conclusion: false,
  colour: "verdict",
};

const TEXTS = ["site", "epoch", "step", "rank", "phase", "metric", "least", "q", "sort"] as const;

export function parse(hash: string): View {
  const [path = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const given = new URLSearchParams(query);
  const texts = Object.fromEntries(TEXTS.map((name) => [name, given.get(name) ?? ""]));
  const pair = /^\/pair\/(\d{1,12})$/.exec(path);
  return {
    ...BARE,
    ...texts,
    place: pair ? "pair" : path === "/choose" ? "choose" : "overview",
    row: pair ? Number(pair[1]) : null,
    verdict: (given.get("verdict") ?? "").split(",").filter(Boolean),
    conclusion: given.get("conclusion") === "1",
    colour: given.get("colour") === "error" ? "error" : "verdict",
  };
}

export function format(view: View): string {
  const query = new URLSearchParams();
  for (const name of TEXTS) if (view[name]) query.set(name, view[name]);
  if (view.verdict.length) query.set("verdict", view.verdict.join(","));
  if (view.conclusion) query.set("conclusion", "1");
  if (view.colour !== "verdict") query.set("colour", view.colour);
  const path =
    view.place === "pair" && view.row !== null ? `/pair/${view.row}` : view.place === "choose" ? "/choose" : "/";
  return `#${path}${query.size ? `?${query}` : ""}`;
}

/** Whether anything is left out of the table. */
export function filtered(view: View): boolean {
  const { site, epoch, step, rank, phase, least, q, verdict, conclusion } = view;
  return Boolean(site || epoch || step || rank || phase || least || q || verdict.length || conclusion);
}

/** Removes all filters. */
export const CLEAR: Partial<View> = {
  site: "",
  epoch: "",
  step: "",
  rank: "",
  phase: "",
  least: "",
  q: "",
  verdict: [],
  conclusion: false,
};

/** `replace`: adds no history entry, so that Back does not stop at every typed letter. */
export type Go = (change: Partial<View>, how?: "push" | "replace") => void;

/** Opens a row. */
export const atRow = (row: number): Partial<View> => ({ place: "pair", row });

export function useView(): [View, Go] {
  const [view, setView] = useState(() => parse(location.hash));
  useEffect(() => {
    const follow = () => setView(parse(location.hash));
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
    };
  }, []);
  const go: Go = (change, how = "push") => {
    const next = { ...parse(location.hash), ...change };
    const address = format(next);
    if (address !== location.hash) history[how === "push" ? "pushState" : "replaceState"](null, "", address);
    setView(next);
  };
  return [view, go];
}
