// The width of an element, updated when it changes.

import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

/** The width of what a ref holds, in pixels; 0 before it is known. */
export function useWidth(box: RefObject<Element | null>): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setWidth(element.clientWidth);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  return width;
}
