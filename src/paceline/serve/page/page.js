// The page at `/`: a chat whose tokens show where they came from, and the server's live figures.
// Knows the public HTTP API only. Whatever a model or server says is inserted as text, never as markup.
"use strict";

const element = (id) => document.getElementById(id);
const ORIGINS = ["target", "draft", "suffix", "forced"];
const HINT = element("detail").textContent;
let messages = [];
let model = null;
let running = null; // AbortController of the answer being written

function add(parent, tag, className, text = "") {
  const child = document.createElement(tag);
  child.className = className;
  child.textContent = text;
  parent.append(child);
  return child;
}

async function request(path, body, signal) {
  const key = sessionStorage.getItem("paceline-key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) {
    element("key-label").hidden = false;
    element("key-label").closest("details").open = true;
  }
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
}

function bodyOfRequest() {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  const speculation = { enabled: element("enabled").checked };
  if (speculation.enabled) {
    speculation.num_draft_tokens = number("num-draft");
    speculation.method = element("method").value || undefined;
  }
  return {
    model: model ?? undefined, messages, stream: true, stream_options: { include_usage: true },
    return_token_details: true, temperature: number("temperature"), seed: number("seed"),
    max_tokens: number("max-tokens"), speculation,
  };
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (pending + value).split(/\r?\n/);
    pending = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function describe(token) {
  const probability = typeof token.logprob === "number" ? `${(Math.exp(token.logprob) * 100).toFixed(1)} %` : "unknown";
  return `${JSON.stringify(token.text)} · ${token.origin} · probability ${probability} · round ${token.round}`;
}

function addToken(answer, token) {
  const origin = ORIGINS.includes(token.origin) ? token.origin : "target";
  const span = add(answer, "span", `token ${origin}`, token.text);
  span.title = describe(token);
  span.tabIndex = answer.childElementCount === 1 ? 0 : -1; // one tab stop per answer; arrows move inside
}

function figuresOf(usage) {
  const s = usage.speculation;
  const parts = [`${usage.completion_tokens} tokens`];
  if (s?.num_rounds) parts.push(`${s.num_rounds} rounds`);
  if (s?.num_draft_tokens) parts.push(`${s.num_accepted_tokens} of ${s.num_draft_tokens} draft tokens accepted`);
  if (typeof s?.ttft_ms === "number") parts.push(`first token ${s.ttft_ms.toFixed(0)} ms`);
  if (s?.decode_ms > 0 && usage.completion_tokens > 1) {
    parts.push(`${((usage.completion_tokens - 1) / s.decode_ms * 1000).toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}

async function readAnswer(response, answer, onText) {
  for await (const chunk of eventsOf(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice) {
      const text = choice.delta?.content ?? "";
      onText(text);
      const tokens = choice.token_details ?? [];
      if (tokens.length) tokens.forEach((token) => addToken(answer, token));
      else if (text) answer.append(text);
      followEnd();
    }
    if (chunk.usage) add(element("log"), "div", "figures quiet", figuresOf(chunk.usage));
  }
}

function followEnd() {
  const view = document.querySelector("main");
  if (view.scrollHeight - view.scrollTop - view.clientHeight < 120) view.scrollTop = view.scrollHeight;
}

async function send() {
  const text = element("prompt").value;
  if (running || !text.trim() || !element("form").reportValidity()) return;
  const mine = (running = new AbortController());
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  add(element("log"), "div", "message user", text);
  const answer = add(element("log"), "div", "message assistant");
  document.querySelector("main").scrollTop = document.querySelector("main").scrollHeight;
  element("prompt").value = "";
  element("send").hidden = true;
  element("stop").hidden = false;
  let content = "";
  try {
    await readAnswer(await request("v1/chat/completions", bodyOfRequest(), mine.signal), answer, (t) => (content += t));
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (messages === conversation) { // else a new chat has begun, and this answer is gone from view
      add(element("log"), "div", stopped ? "figures quiet" : "error", stopped ? "stopped" : error.message);
      if (!content) element("prompt").value ||= text;
    }
  }
  if (content) conversation.push({ role: "assistant", content });
  else conversation.pop(); // a turn without an answer is not part of what the model is told
  running = null;
  element("send").hidden = false;
  element("stop").hidden = true;
  followEnd();
}

function showBars(acceptance) {
  const bars = element("bars");
  const shares = acceptance ?? [];
  bars.replaceChildren();
  bars.setAttribute("viewBox", `0 0 ${Math.max(1, shares.length) * 8} 20`);
  const words = shares.map((share, i) => `${i + 1}: ${(share * 100).toFixed(0)} %`).join(", ") || "no drafts yet";
  bars.setAttribute("aria-label", words);
  const title = document.createElementNS(bars.namespaceURI, "title");
  title.textContent = words;
  bars.append(title);
  shares.forEach((share, position) => {
    const bar = document.createElementNS(bars.namespaceURI, "rect");
    const height = Math.max(1, share * 20);
    Object.entries({ x: position * 8, y: 20 - height, width: 6, height }).forEach(([k, v]) => bar.setAttribute(k, v));
    bars.append(bar);
  });
}

async function showStats() {
  const show = (value, digits = 0, unit = "") => (typeof value === "number" ? value.toFixed(digits) + unit : "–");
  const pair = (times) => `${show(times?.p50, 1)} / ${show(times?.p95, 1)} ms`;
  try {
    if (model === null) {
      model = (await (await request("v1/models")).json()).data[0].id;
      element("model").textContent = model;
    }
    const s = await (await request("stats")).json();
    element("ttft").textContent = pair(s.ttft_ms);
    element("itl").textContent = pair(s.itl_ms);
    element("speculated").textContent = show(s.tokens_per_second?.speculated, 1);
    element("plain").textContent = show(s.tokens_per_second?.plain, 1);
    const gamma = s.num_draft_tokens;
    element("gamma").textContent = gamma === null || gamma === undefined ? "–"
      : typeof gamma === "object" ? Object.values(gamma).join(" / ") : `${gamma}${s.method ? ` ${s.method}` : ""}`;
    element("rows").textContent = show(s.rows_per_step, 1);
    element("kv").textContent = typeof s.kv_cache_usage === "number" ? show(s.kv_cache_usage * 100, 1, " %") : "–";
    element("requests").textContent = `${show(s.num_requests_running)} / ${show(s.num_requests_waiting)}`;
    showBars(s.acceptance_per_position);
  } catch (error) {
    if (model === null) element("model").textContent = error.message;
  }
  setTimeout(showStats, document.hidden ? 5000 : 1000);
}

function moveFocus(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && event.target.classList.contains("token") && event.target[step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

element("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
element("stop").addEventListener("click", () => { running?.abort(); element("prompt").focus(); });
element("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  element("log").replaceChildren();
  element("prompt").focus();
});
element("key").value = sessionStorage.getItem("paceline-key") ?? "";
element("key").addEventListener("change", (event) => sessionStorage.setItem("paceline-key", event.target.value));
for (const kind of ["mouseover", "focusin"]) {
  element("log").addEventListener(kind, (event) => {
    element("detail").textContent = event.target.classList.contains("token") ? event.target.title : HINT;
  });
}
element("log").addEventListener("keydown", moveFocus);
showStats();
