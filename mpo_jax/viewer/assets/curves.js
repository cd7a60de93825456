"use strict";
// Learning curves.

function renderCurve({ name, points }) {
  const [steps, values] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const [left, right, low, high] = [Math.min(...steps), Math.max(...steps), Math.min(...values), Math.max(...values)];
  const x = (step) => (100 * (step - left)) / (right - left || 1);
  const y = (value) => 38 - (36 * (value - low)) / (high - low || 1);
  const line = points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(2)} ${y(value).toFixed(2)}`).join("");
  const shown = element("output", { text: number(values.at(-1)) });
  const figure = element("figure", { class: "curve", "data-left": left, "data-right": right },
    element("figcaption", {}, name, shown),
    element("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
      "aria-label": `${name}: ${number(values[0])} at step ${left}, ${number(values.at(-1))} at step ${right}` },
    element("path", { d: line }), element("line", { y1: 0, y2: 40, visibility: "hidden" })));
  figure.addEventListener("mousemove", (event) => {
    const box = figure.getBoundingClientRect();
    const step = left + ((event.clientX - box.left) / box.width) * (right - left);
    const nearest = points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
    shown.textContent = `${number(nearest[1])} @ ${nearest[0]}`;
  });
  figure.addEventListener("mouseleave", () => { shown.textContent = number(values.at(-1)); });
  return figure;
}

function markStep(figure) {
  const [left, right] = [Number(figure.dataset.left), Number(figure.dataset.right)];
  const step = state.selected?.step;
  const line = figure.querySelector("line");
  line.setAttribute("visibility", step === null || step === undefined ? "hidden" : "visible");
  const x = String((100 * ((step ?? 0) - left)) / (right - left || 1));
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

function toggleCurves() {
  const hide = !find("curves").hidden;
  find("curves").hidden = hide;
  find("curves-button").setAttribute("aria-expanded", String(!hide));
}

