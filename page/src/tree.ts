// Sites as a tree: `h.2.attn/softmax` is in `h.2.attn`, in `h.2`, in `h`. Every node has the worst mark inside of it.

import type { Table } from "./columns";
import type { Marks } from "./marks";

export interface Node {
  readonly path: string;
  readonly label: string;
  type: string | null;
  readonly parent: Node | null;
  readonly children: Node[];
  readonly depth: number;
  /** Code of the worst mark of its own rows and of everything inside; −1 before any row. */
  worst: number;
  rows: number;
  bad: number;
}

export interface Tree {
  readonly tops: readonly Node[];
  readonly nodes: Map<string, Node>;
}

export function grow(table: Table, marks: Marks): Tree {
  const nodes = new Map<string, Node>();
  const tops: Node[] = [];
  const { values, words } = table.column("site");
  const rooted = words?.some((site) => site === "<root>" || site.startsWith("<root>/"));
  const root = rooted ? node("<root>", "<root>", null) : null;

  function node(path: string, label: string, parent: Node | null): Node {
    const made: Node = {
      path,
      label,
      parent,
      type: null,
      children: [],
      depth: parent ? parent.depth + 1 : 0,
      worst: -1,
      rows: 0,
      bad: 0,
    };
    nodes.set(path, made);
    (parent ? parent.children : tops).push(made);
    return made;
  }

  function at(site: string): Node {
    const known = nodes.get(site);
    if (known) return known;
    const { outer, label } = split(site);
    const parent = outer === null ? (site.startsWith("/") ? null : root) : at(outer);
    return node(site, label, parent);
  }

  const own = new Map<number, Node>();
  for (let row = 0; row < table.rows; row++) {
    const code = values[row]!;
    let treeNode = own.get(code);
    if (!treeNode) own.set(code, (treeNode = at(words?.[code] ?? "?")));
    treeNode.type ??= table.word("type", row);
    const mark = marks.codes[row]!;
    const bad = marks.kinds[mark]!.bad ? 1 : 0;
    for (let up: Node | null = treeNode; up; up = up.parent) {
      up.worst = up.worst < 0 ? mark : marks.worse(up.worst, mark);
      up.rows++;
      up.bad += bad;
    }
  }
  return { tops, nodes };
}

/** Most levels of the tree: no model has more, but a hostile name may. */
const DEEPEST = 64;

/** The site that encloses another one, and the latter's name in it. */
function split(site: string): { outer: string | null; label: string } {
  const slash = site.indexOf("/");
  if (slash > 0) return { outer: site.slice(0, slash), label: site.slice(slash) };
  if (slash === 0) return { outer: null, label: site };
  const parts = site.split(".");
  const inner = parts.splice(Math.min(parts.length - 1, DEEPEST)).join(".");
  return { outer: parts.join(".") || null, label: inner };
}

/** The nodes that a list shows: of open nodes the children, of a search what matches and what encloses it. */
export function visible(tree: Tree, open: ReadonlySet<string>, query: string): Node[] {
  const wanted = query.trim().toLowerCase();
  const kept = wanted ? matching(tree, wanted) : null;
  const list: Node[] = [];
  const visit = (node: Node): void => {
    if (kept && !kept.has(node)) return;
    list.push(node);
    if (kept || open.has(node.path)) node.children.forEach(visit);
  };
  tree.tops.forEach(visit);
  return list;
}

function matching(tree: Tree, wanted: string): Set<Node> {
  const kept = new Set<Node>();
  for (const node of tree.nodes.values()) {
    if (!`${node.path} ${node.type ?? ""}`.toLowerCase().includes(wanted)) continue;
    for (let up: Node | null = node; up && !kept.has(up); up = up.parent) kept.add(up);
  }
  return kept;
}

/** A node and everything around it. */
export function lineage(tree: Tree, site: string): string[] {
  const paths: string[] = [];
  for (let up = tree.nodes.get(site) ?? null; up; up = up.parent) paths.push(up.path);
  return paths;
}
