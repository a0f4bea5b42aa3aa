// Colours for how large an error is: from dark blue to yellow, rising steadily in lightness, so that it reads in grey too.

const STOPS: readonly [number, number, number][] = [
  [38, 42, 92],
  [45, 88, 138],
  [42, 128, 140],
  [72, 168, 120],
  [160, 204, 75],
  [246, 222, 60],
];

/** The colour at a place between 0 and 1. */
export function rampAt(place: number): string {
  const [red, green, blue] = mixed(place);
  return `rgb(${red},${green},${blue})`;
}

export function mixed(place: number): [number, number, number] {
  const at = Math.min(1, Math.max(0, place)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  const [one, other] = [STOPS[low]!, STOPS[low + 1]!];
  return [0, 1, 2].map((part) => Math.round(one[part]! + (other[part]! - one[part]!) * (at - low))) as [
    number,
    number,
    number,
  ];
}

export const RAMP_CSS = `linear-gradient(to right, ${STOPS.map((stop) => `rgb(${stop.join(",")})`).join(", ")})`;
