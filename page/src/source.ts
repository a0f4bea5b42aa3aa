// Where documents come from: a server (`astray view`), or the file that contains the page (`compare --html`).

import { decode, headed, type Table } from "./columns";
import type { Overview, Pair, RunFacts, Session } from "./documents";

export interface Source {
  session(): Promise<Session>;
  overview(): Promise<Overview>;
  columns(): Promise<Table>;
  /** Everything about one row, or null where this source does not have it. */
  pair(row: number): Promise<Pair | null>;
  // Only a server has the following.
  /** One run with all that is known of it, which a list of many runs leaves out. */
  run?(id: string): Promise<RunFacts>;
  compare?(request: CompareRequest): Promise<void>;
  stop?(): Promise<void>;
  /** `conclusion` is the metric by which of each wrong site the worst row is shown; empty shows all rows. */
  exportAddress?(kind: "csv" | "xlsx", filter: string, sort: string, conclusion: string): string;
}

export interface CompareRequest {
  reference: string;
  /** Null to show the reference alone. */
  candidate: string | null;
  /** A second recording of the reference, whose differences count as noise. */
  noise: string | null;
  options: Record<string, unknown>;
}

const STALE = "Something else has been compared since, perhaps in another tab. Reload the page to see it.";

export class Remote implements Source {
  /** Which comparison the table is of: the server counts them, and rows of another one are other tensors. */
  private shown: string | null = null;

  session(): Promise<Session> {
    return ask("session");
  }

  overview(): Promise<Overview> {
    return ask("overview");
  }

  async columns(): Promise<Table> {
    const response = await answer("columns");
    this.shown = response.headers.get("X-Generation");
    return decode(await response.arrayBuffer());
  }

  async pair(row: number): Promise<Pair> {
    const response = await answer(`pair/${row}`);
    if (response.headers.get("X-Generation") !== this.shown) throw new Error(STALE);
    return (await response.json()) as Pair;
  }

  run(id: string): Promise<RunFacts> {
    return ask(`run/${encodeURIComponent(id)}`);
  }

  async compare(request: CompareRequest): Promise<void> {
    await answer("compare", post(request));
  }

  async stop(): Promise<void> {
    await answer("stop", post({}));
  }

  exportAddress(kind: "csv" | "xlsx", filter: string, sort: string, conclusion: string): string {
    const query = new URLSearchParams();
    if (filter) query.set("filter", filter);
    if (sort) query.set("sort", sort);
    if (conclusion) query.set("conclusion", "1");
    if (conclusion && conclusion !== "error") query.set("metric", conclusion);
    return `/api/export.${kind}${query.size ? `?${query}` : ""}`;
  }
}

async function answer(path: string, request?: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(`/api/${path}`, { credentials: "same-origin", ...request });
  } catch {
    throw new Error("The server does not answer. Is `astray view` still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  throw new Error(messageIn(text) || `The server answered ${response.status} to ${path}.`);
}

/** The sentence of an error answer: {"error": …}, or plain text. */
function messageIn(text: string): string {
  try {
    const { error } = JSON.parse(text) as { error?: unknown };
    return typeof error === "string" ? error : "";
  } catch {
    return text.length < 500 ? text : "";
  }
}

async function ask<T>(path: string): Promise<T> {
  return (await (await answer(path)).json()) as T;
}

/** A request that only this page can make: pages of other sites cannot set the header. */
function post(body: object): RequestInit {
  return {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Astray": "page" },
    body: JSON.stringify(body),
  };
}

interface Documents {
  session: Session;
  overview: Overview;
  pairs: Record<string, Pair>;
}

/** The documents in a one-file report: deflated, in base64; the length of the JSON, the JSON, then the table. */
export class Embedded implements Source {
  private readonly contents: Promise<{ documents: Documents; table: Table }>;

  constructor(element: Element) {
    this.contents = inflate(element.textContent ?? "").then((bytes) => {
      const { value, end } = headed<Documents>(bytes, 0);
      return { documents: value, table: decode(bytes, end) };
    });
  }

  async session(): Promise<Session> {
    return (await this.contents).documents.session;
  }

  async overview(): Promise<Overview> {
    return (await this.contents).documents.overview;
  }

  async columns(): Promise<Table> {
    return (await this.contents).table;
  }

  async pair(row: number): Promise<Pair | null> {
    return (await this.contents).documents.pairs[String(row)] ?? null;
  }
}

async function inflate(text: string): Promise<ArrayBuffer> {
  const packed = new Blob([fromBase64(text.trim()) as BlobPart]).stream();
  return new Response(packed.pipeThrough(new DecompressionStream("deflate-raw"))).arrayBuffer();
}

function fromBase64(text: string): Uint8Array {
  const native = (Uint8Array as { fromBase64?: (text: string) => Uint8Array }).fromBase64;
  if (native) return native.call(Uint8Array, text); // newer browsers; five times as fast
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/** The source of this document. */
export function sourceOf(document: Document): Source {
  const data = document.getElementById("astray-data");
  return data ? new Embedded(data) : new Remote();
}
