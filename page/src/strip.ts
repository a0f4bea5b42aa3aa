// The canvas of the timeline: the position of each call, and how it is painted.
// Where there are more calls than pixels, a cell shows the worst of its calls.

import type { Data } from "./data";
import { severalOf } from "./names";
import { colour } from "./theme";
import { rampAt } from "./ramp";

const LEFT = 58; // pixels for the names of steps
const TOP = 16; // pixels for the names of phases
const LOWEST = 3; // least height of a lane
const HIGHEST = 20;
const ROOM = 176; // height of all lanes

export interface Look {
  readonly colour: "verdict" | "error";
  /** The chosen row. */
  readonly row: number | null;
  /** Which calls have rows in the table as it is filtered; null if all have. */
  readonly shown: Uint8Array | null;
}

export class Strip {
  readonly height: number;
  /** Powers of ten between which errors lie. */
  readonly errors: { low: number; high: number };
  private readonly plot: number; // pixels for all slots
  private readonly columns: number;
  private readonly lines: number;
  private readonly laneHeight: number;
  private readonly cellWidth: number;
  /** The call that a cell shows, plus one; 0 where there is none. */
  private readonly cells: Uint32Array;

  constructor(
    private readonly data: Data,
    readonly width: number,
    /** Of each call its largest error. */
    private readonly off: Float64Array,
  ) {
    const { grid } = data;
    this.lines = Math.max(1, Math.min(grid.lanes.length, Math.floor(ROOM / LOWEST)));
    this.laneHeight = Math.max(LOWEST, Math.min(HIGHEST, Math.floor(ROOM / this.lines)));
    this.height = TOP + this.lines * this.laneHeight + 2;
    this.plot = Math.max(10, width - LEFT - 2);
    this.columns = Math.max(1, Math.min(grid.slots, this.plot));
    this.cellWidth = this.plot / this.columns;
    this.cells = this.pooled();
    this.errors = errorRange(off);
  }

  /** For each cell the worst call in it: the worst mark, then the largest error, then the first. */
  private pooled(): Uint32Array {
    const { grid, marks } = this.data;
    const weight = (call: number): number => marks.kinds[grid.worst[call]!]!.weight;
    const cells = new Uint32Array(this.columns * this.lines);
    for (let call = 0; call < grid.lane.length; call++) {
      const cell = this.line(call) * this.columns + this.column(call);
      const held = cells[cell]! - 1;
      const gap = held < 0 ? 1 : weight(call) - weight(held);
      if (gap > 0 || (gap === 0 && this.off[call]! > this.off[held]!)) cells[cell] = call + 1;
    }
    return cells;
  }

  private column(call: number): number {
    return Math.floor((this.data.grid.slot[call]! * this.columns) / this.data.grid.slots);
  }

  private line(call: number): number {
    return Math.floor((this.data.grid.lane[call]! * this.lines) / this.data.grid.lanes.length);
  }

  /** The call at a point, or next to it: cells may be a pixel wide. */
  callAt(x: number, y: number): number | null {
    const line = Math.floor((y - TOP) / this.laneHeight);
    const column = Math.floor((x - LEFT) / this.cellWidth);
    if (line < 0 || line >= this.lines) return null;
    for (const near of [0, -1, 1, -2, 2]) {
      const at = column + near;
      const call = at >= 0 && at < this.columns ? this.cells[line * this.columns + at]! : 0;
      if (call) return call - 1;
    }
    return null;
  }

  paint(pen: CanvasRenderingContext2D, look: Look): void {
    const { data } = this;
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    this.names(pen);
    this.paintCells(pen, look);
    if (data.first !== null) this.ring(pen, data.calls.of(data.first), colour("ink"), "first");
    if (look.row !== null) this.ring(pen, data.calls.of(look.row), colour("accent"), "");
  }

  private paintCells(pen: CanvasRenderingContext2D, look: Look): void {
    const { grid, marks } = this.data;
    const inks = marks.kinds.map((mark) => colour(`mark-${mark.look}`));
    const [unknown, none, paper] = [colour("line"), colour("mark-identical"), colour("panel")];
    const { low, high } = this.errors;
    const inkOf = (error: number): string =>
      Number.isNaN(error) ? unknown : error === 0 ? none : rampAt((Math.log10(error) - low) / (high - low));
    const across = Math.max(1, this.cellWidth - (this.cellWidth >= 5 ? 1 : 0));
    const down = this.laneHeight - (this.laneHeight >= 6 ? 1 : 0);
    const roomy = this.cellWidth >= 7 && this.laneHeight >= 7;
    for (let cell = 0; cell < this.cells.length; cell++) {
      const call = this.cells[cell]! - 1;
      if (call < 0) continue;
      const x = LEFT + (cell % this.columns) * this.cellWidth;
      const y = TOP + Math.floor(cell / this.columns) * this.laneHeight;
      pen.globalAlpha = look.shown && !look.shown[call] ? 0.18 : 1;
      pen.fillStyle = look.colour === "error" ? inkOf(this.off[call]!) : inks[grid.worst[call]!]!;
      pen.fillRect(x, y, across, down);
      if (roomy && marks.kinds[grid.worst[call]!]!.bad) cross(pen, x + across / 2, y + down / 2, paper);
    }
    pen.globalAlpha = 1;
  }

  /** The labels: phases above, steps on the left. */
  private names(pen: CanvasRenderingContext2D): void {
    const { grid, table } = this.data;
    const several = severalOf(table);
    const slot = this.plot / grid.slots;
    pen.fillStyle = colour("dim");
    pen.textAlign = "left";
    grid.phases.forEach(([from, phase], at) => {
      const room = ((grid.phases[at + 1]?.[0] ?? grid.slots) - from) * slot;
      if (room > pen.measureText(phase).width + 6) pen.fillText(phase, LEFT + from * slot + 1, TOP / 2);
    });
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(13 / this.laneHeight));
    for (let line = 0; line < this.lines; line += every) {
      const lane = grid.lanes[Math.floor((line * grid.lanes.length) / this.lines)];
      if (!lane) continue;
      const more = (several.micro ? `.${lane.micro}` : "") + (several.rank ? ` r${lane.rank}` : "");
      const y = TOP + line * this.laneHeight + Math.max(this.laneHeight, 8) / 2;
      pen.fillText(`step ${lane.step}${more}`, LEFT - 8, y, LEFT - 10);
    }
  }

  private ring(pen: CanvasRenderingContext2D, call: number, ink: string, name: string): void {
    const x = LEFT + this.column(call) * this.cellWidth;
    const y = TOP + this.line(call) * this.laneHeight;
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(x - 2, y - 2, Math.max(4, this.cellWidth + 3), this.laneHeight + 3);
    if (!name) return;
    const room = pen.measureText(name).width;
    const left = x > this.width - 60 ? x - room - 7 : x + this.cellWidth + 3;
    const middle = y + this.laneHeight / 2;
    pen.fillStyle = colour("panel");
    pen.fillRect(left, middle - 6, room + 4, 12);
    pen.fillStyle = ink;
    pen.textAlign = "left";
    pen.fillText(name, left + 2, middle);
  }
}

/** Bad cells are crossed as well as coloured. */
function cross(pen: CanvasRenderingContext2D, x: number, y: number, ink: string): void {
  pen.strokeStyle = ink;
  pen.lineWidth = 1.2;
  pen.beginPath();
  pen.moveTo(x - 2.5, y - 2.5);
  pen.lineTo(x + 2.5, y + 2.5);
  pen.moveTo(x + 2.5, y - 2.5);
  pen.lineTo(x - 2.5, y + 2.5);
  pen.stroke();
}

function errorRange(errors: Float64Array): { low: number; high: number } {
  let [low, high] = [Infinity, -Infinity];
  for (const error of errors) {
    if (!(error > 0) || !Number.isFinite(error)) continue;
    low = Math.min(low, error);
    high = Math.max(high, error);
  }
  if (low > high) return { low: -8, high: 0 };
  const from = Math.floor(Math.log10(low));
  return { low: from, high: Math.max(from + 1, Math.ceil(Math.log10(high))) };
}
