"use strict";
// What comes from environments and policies reaches the page through `element` only: as text nodes, never as markup.
const page = JSON.parse(document.getElementById("data").textContent);
const CHANNELS = [
  { name: "advantage", label: "Advantage", short: "A", middle: 0 },
  { name: "ratio", label: "Ratio", short: "ρ", middle: 1, log: true },
  { name: "gap", label: "Log-prob gap", short: "gap", middle: 0 },
  { name: "progress", label: "Progress Advantage", short: "PA", middle: 0 },
  { name: "value", label: "Value", short: "V" },
  { name: "entropy", label: "Entropy", short: "H" },
  { name: "logprob", label: "Surprise", short: "−log π", sign: -1 }, // when sampled
].filter((channel) => page.episodes.some((episode) => channel.name in episode.credit));
const state = { shown: [], selected: null, turn: 0, channel: CHANNELS[0], byTurn: false };
const find = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = tag === "svg" || tag === "path" || tag === "line"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "NaN";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

const judge = (episode) => (episode.reward === null ? "" : episode.reward > 0 ? "good" : "bad");
const span = (values) => {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return values.length === 0 ? "none" : low === high ? String(low) : `${low}–${high}`;
};

// Shading. A channel's scale is that of all episodes of the page, cut at its 98th percentile.

const measure = (channel, value) => (channel.log ? Math.log(Math.max(value, 1e-6)) : value * (channel.sign ?? 1));
const scales = new Map();

function scale(channel) {
  if (!scales.has(channel.name)) {
    const sizes = [];
    for (const episode of page.episodes) {
      for (const value of episode.credit[channel.name] ?? []) {
        if (value !== null) sizes.push(Math.abs(measure(channel, value)));
      }
    }
    sizes.sort((a, b) => a - b);
    scales.set(channel.name, sizes[Math.floor(0.98 * (sizes.length - 1))] || 1);
  }
  return scales.get(channel.name);
}

function shade(channel, value) {
  if (value === null || value === undefined) return "transparent";
  const level = measure(channel, value) / scale(channel);
  const hue = channel.middle === undefined ? "level" : level < 0 ? "minus" : "plus";
  return `rgb(var(--${hue}) / ${(0.62 * Math.min(Math.abs(level), 1)).toFixed(3)})`;
}

const mean = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

// One list of turns an episode: its pieces, and for sampled ones the place of their credit.

function turnsOf(episode) {
  let [token, sampled] = [0, 0];
  return episode.turns.map((length) => {
    const turn = { read: [], acted: [], after: [], first: sampled };
    for (const end = token + length; token < end; token += 1) {
      if (episode.sampled[token] === "1") turn.acted.push({ text: episode.pieces[token], place: sampled++ });
      else (turn.acted.length ? turn.after : turn.read).push(episode.pieces[token]);
    }
    turn.last = sampled;
    return turn;
  });
}

function tip(event, episode, place) {
  const lines = CHANNELS.map(({ name, label, sign }) => {
    const value = episode.credit[name]?.[place];
    return value === undefined ? null : `${label.padEnd(19)}${number(value === null ? null : value * (sign ?? 1))}`;
  });
  const box = find("tip") ?? document.body.appendChild(element("div", { id: "tip", role: "tooltip" }));
  box.textContent = lines.filter(Boolean).join("\n");
  const [x, y] = [event.clientX + 14, event.clientY + 16];
  box.style.left = `${Math.min(x, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(y, innerHeight - box.offsetHeight - 8)}px`;
}

const turnMean = (episode, { name }, turn) => mean(episode.credit[name].slice(turn.first, turn.last));

function renderTurn(episode, turn, index) {
  const facts = CHANNELS.filter(({ name }) => name in episode.credit).map((channel) => {
    const average = turnMean(episode, channel, turn);
    return element("span", { title: `${channel.label}, mean over the turn` }, `${channel.short} `,
      element("b", { text: number(average === null ? null : average * (channel.sign ?? 1)) }));
  });
  const values = episode.credit[state.channel?.name];
  const whole = values && turnMean(episode, state.channel, turn);
  const acted = turn.acted.map(({ text, place }) => {
    const token = element("span", { class: "token", text, "data-place": place });
    if (values) token.style.background = shade(state.channel, state.byTurn ? whole : values[place]);
    return token;
  });
  const read = (texts) => (texts.length ? element("p", { class: "text read", text: texts.join("") }) : null);
  return element("section", { class: `turn${index === state.turn ? " current" : ""}`, "aria-label": `Turn ${index}` },
    element("header", {}, element("strong", { text: `Turn ${index}` }),
      element("span", {}, "reward ", element("b", { text: number(episode.rewards[index]) })),
      element("span", { text: `version ${episode.versions[index]}` }), ...facts),
    read(turn.read), element("p", { class: "text" }, ...acted), read(turn.after));
}

// A cell a turn, shaded by the mean: where in a long episode the credit lies.
function renderStrip(episode, turns) {
  const cells = turns.map((turn, index) => {
    const cell = element("button", { type: "button", title: `Turn ${index}`, "aria-label": `Turn ${index}`, tabindex: -1,
      on: { click: () => moveTurn(index - state.turn) } });
    if (state.channel && state.channel.name in episode.credit) {
      cell.style.background = shade(state.channel, turnMean(episode, state.channel, turn));
    }
    return cell;
  });
  return element("div", { class: "strip" }, ...cells);
}

function renderChannels(strip) {
  const buttons = CHANNELS.map((channel, index) =>
    element("button", { type: "button", "aria-pressed": channel === state.channel, on: { click: () => choose(channel) } },
      `${channel.label} `, element("kbd", { text: index + 1 })));
  if (!state.channel) return element("div", { class: "channels" }, strip);
  const { middle, log } = state.channel;
  const [size, bar] = [scale(state.channel), element("i")];
  const ends = middle === undefined ? [0, size] : log ? [Math.exp(-size), Math.exp(size)] : [-size, size];
  const low = middle === undefined ? "transparent" : "rgb(var(--minus) / .62)";
  const high = `rgb(var(--${middle === undefined ? "level" : "plus"}) / .62)`;
  bar.style.background = `linear-gradient(to right, ${low}, ${middle === undefined ? "" : "transparent,"} ${high})`;
  const whole = element("button", { type: "button", "aria-pressed": state.byTurn, on: { click: toggleTurns } },
    "Whole turns ", element("kbd", { text: "t" }));
  return element("div", { class: "channels", role: "toolbar", "aria-label": "Shading" }, ...buttons, whole, strip,
    element("span", { class: "legend" }, number(ends[0]), bar, number(ends[1])));
}

function renderEpisode() {
  const episode = state.selected;
  if (!episode) {
    find("episode").replaceChildren(element("p", { class: "empty", text: "No episode passes the filters." }));
    return;
  }
  const fact = (name, value) => element("span", {}, `${name} `, element("b", { text: value }));
  const notes = Object.entries(episode.notes).flatMap(([name, value]) =>
    [element("dt", { text: name }), element("dd", { text: Array.isArray(value) ? value.join("\n") : String(value) })]);
  const parts = turnsOf(episode);
  const turns = parts.map((turn, index) => renderTurn(episode, turn, index));
  find("episode").replaceChildren(
    element("h2", { text: episode.prompt || episode.task }),
    element("p", { class: "facts" },
      element("span", {}, "reward ", element("b", { class: judge(episode), text: number(episode.reward) })),
      fact("task", episode.task), fact("episode", episode.id), fact("group", episode.group), fact("end", episode.end),
      fact("version", span(episode.versions)), fact("tokens", episode.pieces.length),
      episode.step === null ? null : fact("learner step", episode.step)),
    notes.length ? element("details", { class: "notes" }, element("summary", { text: "Notes" }),
      element("dl", {}, ...notes)) : element("span"),
    renderChannels(renderStrip(episode, parts)), ...(turns.length ? turns : [element("p", { class: "empty", text: "It failed before it acted." })]));
  document.querySelectorAll(".curve").forEach(markStep);
}

// The list and its filters.

function passes(episode) {
  const word = find("task").value.trim().toLowerCase();
  const bound = (id, fallback) => (find(id).value === "" ? fallback : Number(find(id).value));
  const [low, high] = [bound("reward-min", -Infinity), bound("reward-max", Infinity)];
  const [first, last] = [bound("version-min", -Infinity), bound("version-max", Infinity)];
  const end = find("end").value;
  if (episode.reward === null ? find("reward-min").value || find("reward-max").value
    : episode.reward < low || episode.reward > high) return false;
  if (first !== -Infinity || last !== Infinity) {
    if (!episode.versions.some((version) => version >= first && version <= last)) return false;
  }
  if (end && episode.end !== end) return false;
  episode.text ??= [episode.task, episode.id, episode.prompt, ...Object.values(episode.notes), episode.pieces.join("")].join("\n").toLowerCase();
  return episode.text.includes(word);
}

function filter() {
  state.shown = page.episodes.filter(passes);
  const solved = state.shown.filter((episode) => episode.reward > 0).length;
  const share = state.shown.length ? `, ${solved} with a reward above 0 (${Math.round((100 * solved) / state.shown.length)} %)` : "";
  find("count").textContent = `${state.shown.length} of ${page.episodes.length} episodes${share}`;
  find("list").replaceChildren(...state.shown.map((episode, index) =>
    element("li", { role: "option", id: `option-${index}`, on: { click: () => select(episode) } },
      element("span", { class: `dot ${judge(episode)}` }), element("b", { text: episode.prompt || episode.task }),
      element("span", { class: `reward ${judge(episode)}`, text: number(episode.reward) }),
      element("small", { text: `${episode.task} · version ${span(episode.versions)} · ${episode.turns.length} turns · ${episode.end}` }))));
  select(state.shown.includes(state.selected) ? state.selected : state.shown[0] ?? null);
}

function select(episode) {
  state.turn = episode === state.selected ? state.turn : 0;
  state.selected = episode;
  const place = state.shown.indexOf(episode);
  [...find("list").children].forEach((item, index) => item.setAttribute("aria-selected", index === place));
  find("list").setAttribute("aria-activedescendant", `option-${place}`);
  find("list").children[place]?.scrollIntoView({ block: "nearest" });
  renderEpisode();
  find("episode").scrollTop = 0;
}

function move(by) {
  const place = state.shown.indexOf(state.selected) + by;
  if (state.shown[place]) select(state.shown[place]);
}

function moveTurn(by) {
  state.turn = Math.max(0, Math.min(state.turn + by, (state.selected?.turns.length ?? 1) - 1));
  const turns = [...document.querySelectorAll(".turn")];
  turns.forEach((turn, index) => turn.classList.toggle("current", index === state.turn));
  turns[state.turn]?.scrollIntoView({ block: "start" });
}

function rerender() {
  const top = find("episode").scrollTop;
  renderEpisode();
  find("episode").scrollTop = top;
}

function choose(channel) {
  state.channel = channel ?? state.channel;
  rerender();
}

function toggleTurns() {
  state.byTurn = !state.byTurn;
  rerender();
}

// Keys.

const KEYS = {
  j: () => move(1), k: () => move(-1), n: () => moveTurn(1), p: () => moveTurn(-1), t: toggleTurns, c: toggleCurves,
  x: () => find("filters").reset(), "?": () => find("help").showModal(), "/": () => find("task").focus(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select");
  if (event.key === "Escape" && typing) find("list").focus();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
  const onList = event.target === find("list");
  const arrows = { ArrowDown: () => move(1), ArrowUp: () => move(-1),
    Home: () => move(-state.shown.indexOf(state.selected)),
    End: () => move(state.shown.length - 1 - state.shown.indexOf(state.selected)) };
  const digit = /^[1-9]$/.test(event.key) ? () => choose(CHANNELS[Number(event.key) - 1]) : undefined;
  const action = Object.hasOwn(KEYS, event.key) ? KEYS[event.key]
    : onList && Object.hasOwn(arrows, event.key) ? arrows[event.key] : digit;
  if (action) {
    event.preventDefault();
    action();
  }
});

find("title").textContent = document.title = page.title;
find("links").append(...Object.entries(page.links).map(([label, href]) => element("a", { href, text: label })));
find("end").append(...[...new Set(page.episodes.map((episode) => episode.end))].sort().map((end) =>
  element("option", { value: end, text: end })));
find("curves").append(...page.curves.map(renderCurve));
find("curves-button").hidden = !page.curves.length;
find("curves-button").addEventListener("click", toggleCurves);
find("help-button").addEventListener("click", () => find("help").showModal());
find("filters").addEventListener("input", filter);
find("filters").addEventListener("reset", () => setTimeout(filter));
find("filters").addEventListener("submit", (event) => event.preventDefault());
find("episode").addEventListener("mousemove", (event) => {
  const place = event.target.dataset?.place;
  if (place === undefined) find("tip")?.remove();
  else tip(event, state.selected, Number(place));
});
find("episode").addEventListener("mouseleave", () => find("tip")?.remove());
filter();
find("list").focus();
