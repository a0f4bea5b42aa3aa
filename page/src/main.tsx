// The beginning: the document tells where the data is, and the page is drawn into it.

import "../styles/page.css";
import { render } from "preact";
import { App } from "./app";
import { sourceOf } from "./source";
import { choose, chosenTheme } from "./theme";

choose(chosenTheme());
render(<App source={sourceOf(document)} />, document.getElementById("app") ?? document.body);
