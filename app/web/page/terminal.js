// A small terminal for Shoal's dashboard: it draws the part of the xterm language that Textual writes, and sends keys,
// pastes and mouse events as xterm does. The protocol of the socket is described in app/web/__init__.py.
"use strict";

const WIDE = [[0x1100, 0x115f], [0x2e80, 0x303e], [0x3041, 0xa4cf], [0xac00, 0xd7a3], [0xf900, 0xfaff], [0xfe30, 0xfe6f],
  [0xff00, 0xff60], [0xffe0, 0xffe6], [0x1f300, 0x1f64f], [0x1f680, 0x1f6ff], [0x1f900, 0x1f9ff], [0x20000, 0x3fffd]];
const ANSI = ["#000000", "#cd3131", "#0dbc79", "#e5e510", "#2472c8", "#bc3fbc", "#11a8cd", "#e5e5e5",
  "#666666", "#f14c4c", "#23d18b", "#f5f543", "#3b8eea", "#d670d6", "#29b8db", "#ffffff"];
const PLAIN = Object.freeze({ fg: "", bg: "", bold: false, dim: false, italic: false, underline: false, strike: false, reverse: false });
const ESCAPE_MS = 250;
const CLOSED = {
  4001: "This link was used already, is too old or is not complete. Run `shoal web` again for a new one.",
  4002: "Too many pages are open: close one, then reload this one.",
  4003: "The dashboard was closed; the node keeps running. Reload the page to open it again.",
  1008: "The server refused this page.",
};

function cellsOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x300) return 1;
  if (/^[\p{Mn}\p{Me}\u200b-\u200f\ufe00-\ufe0f]$/u.test(character)) return 0;
  return WIDE.some(([low, high]) => low <= code && code <= high) ? 2 : 1;
}

function colour256(number) {
  if (number < 16) return ANSI[number] || "";
  if (number >= 232) return `rgb(${Array(3).fill(8 + 10 * (number - 232)).join(",")})`;
  const level = (n) => (n ? 55 + 40 * n : 0);
  const index = number - 16;
  return `rgb(${level(Math.floor(index / 36))},${level(Math.floor(index / 6) % 6)},${level(index % 6)})`;
}

// The picture: rows of cells. A cell is [text, style]; the second half of a wide character is ["", style].
class Grid {
  constructor(width, height) {
    this.resize(width, height);
  }

  resize(width, height) {
    this.width = width;
    this.height = height;
    this.rows = Array.from({ length: height }, () => this.blank(PLAIN));
    this.dirty = new Set(this.rows.keys());
    this.x = this.y = 0;
    this.style = PLAIN;
    this.rest = "";
  }

  blank(style) {
    return Array.from({ length: this.width }, () => [" ", style]);
  }

  put(character) {
    const cells = cellsOf(character);
    const row = this.rows[this.y];
    if (!row) return;
    if (cells === 0) {
      const before = row[this.x - 1];
      if (before && before[0].length < 16) row[this.x - 1] = [before[0] + character, before[1]];
    } else if (this.x + cells <= this.width) {
      row[this.x] = [character, this.style];
      if (cells === 2) row[this.x + 1] = ["", this.style];
      this.x += cells;
    }
    this.dirty.add(this.y);
  }

  write(text) {
    text = this.rest + text;
    this.rest = "";
    let at = 0;
    while (at < text.length) {
      const code = text.charCodeAt(at);
      if (code === 0x1b) {
        const used = this.escape(text, at);
        if (used === 0) {
          this.rest = text.slice(at, at + 1000000); // the rest of the sequence comes with the next message
          return;
        }
        at += used;
      } else if (code < 0x20 || code === 0x7f) {
        if (code === 0x0a) [this.x, this.y] = [0, Math.min(this.y + 1, this.height - 1)];
        else if (code === 0x0d) this.x = 0;
        else if (code === 0x08) this.x = Math.max(0, this.x - 1);
        at += 1;
      } else {
        const character = String.fromCodePoint(text.codePointAt(at));
        this.put(character);
        at += character.length;
      }
    }
  }

  // Handles the sequence at a position; returns its length, or 0 if its end has not come yet.
  escape(text, at) {
    const kind = text[at + 1];
    if (kind === undefined) return 0;
    if (kind === "[") {
      const found = /^[0-9;:?<=>!$ ]*[@-~]/.exec(text.slice(at + 2, at + 2 + 256));
      if (!found) return text.length - at > 256 ? 2 : 0;
      this.control(found[0].slice(0, -1), found[0].slice(-1));
      return 2 + found[0].length;
    }
    if (kind === "]" || kind === "P" || kind === "_" || kind === "^") {
      const end = /\x07|\x1b\\/.exec(text.slice(at + 2));
      if (!end) return text.length - at > 900000 ? 2 : 0;
      if (kind === "]") this.command(text.slice(at + 2, at + 2 + end.index));
      return 2 + end.index + end[0].length;
    }
    return 2;
  }

  control(parameters, letter) {
    if (/[?<=>!$ ]/.test(parameters)) return; // modes: the page sends mouse events and pastes in any case
    const numbers = parameters.split(";").map((part) => parseInt(part, 10));
    const first = numbers[0] || 1;
    if (letter === "m") this.paint(parameters.split(/[;:]/).map((part) => parseInt(part, 10) || 0));
    else if (letter === "H" || letter === "f") [this.y, this.x] = [first - 1, (numbers[1] || 1) - 1];
    else if (letter === "A") this.y -= first;
    else if (letter === "B") this.y += first;
    else if (letter === "C") this.x += first;
    else if (letter === "D") this.x -= first;
    else if (letter === "G") this.x = first - 1;
    else if (letter === "d") this.y = first - 1;
    else if (letter === "J") this.clear(0, this.height);
    else if (letter === "K") {
      for (let x = this.x; x < this.width && this.rows[this.y]; x++) this.rows[this.y][x] = [" ", this.style];
      this.dirty.add(this.y);
    }
    this.x = Math.max(0, Math.min(this.width - 1, this.x));
    this.y = Math.max(0, Math.min(this.height - 1, this.y));
  }

  clear(from, to) {
    for (let y = from; y < to; y++) {
      this.rows[y] = this.blank(this.style);
      this.dirty.add(y);
    }
  }

  paint(numbers) {
    const style = { ...this.style };
    for (let index = 0; index < numbers.length; index++) {
      const number = numbers[index];
      if (number === 0) Object.assign(style, PLAIN);
      else if (number === 1) style.bold = true;
      else if (number === 2) style.dim = true;
      else if (number === 3) style.italic = true;
      else if (number === 4) style.underline = true;
      else if (number === 7) style.reverse = true;
      else if (number === 9) style.strike = true;
      else if (number === 22) style.bold = style.dim = false;
      else if (number === 23) style.italic = false;
      else if (number === 24) style.underline = false;
      else if (number === 27) style.reverse = false;
      else if (number === 29) style.strike = false;
      else if (number === 39) style.fg = "";
      else if (number === 49) style.bg = "";
      else if (number >= 30 && number <= 37) style.fg = ANSI[number - 30];
      else if (number >= 40 && number <= 47) style.bg = ANSI[number - 40];
      else if (number >= 90 && number <= 97) style.fg = ANSI[number - 82];
      else if (number >= 100 && number <= 107) style.bg = ANSI[number - 92];
      else if (number === 38 || number === 48) {
        const name = number === 38 ? "fg" : "bg";
        if (numbers[index + 1] === 2) {
          style[name] = `rgb(${numbers.slice(index + 2, index + 5).join(",")})`;
          index += 4;
        } else if (numbers[index + 1] === 5) {
          style[name] = colour256(numbers[index + 2]);
          index += 2;
        }
      }
    }
    this.style = style;
  }

  command(text) {
    const copied = /^52;[a-z0-9]*;([A-Za-z0-9+/=]+)$/.exec(text);
    if (!copied || !navigator.clipboard) return;
    const bytes = Uint8Array.from(atob(copied[1]), (character) => character.charCodeAt(0));
    navigator.clipboard.writeText(new TextDecoder().decode(bytes)).catch(() => {});
  }

  text() {
    return this.rows.map((row) => row.map((cell) => cell[0]).join("").trimEnd()).join("\n");
  }
}

// Draws a grid into an element, row by row; only rows that changed.
class Painter {
  constructor(element) {
    this.element = element;
    this.fits = new Map(); // character -> whether the font draws it one cell wide
    this.measure();
  }

  measure() {
    const context = document.createElement("canvas").getContext("2d");
    const font = getComputedStyle(this.element);
    context.font = `${font.fontSize} ${font.fontFamily}`;
    const size = parseFloat(font.fontSize);
    const bar = context.measureText("│");
    const tall = bar.fontBoundingBoxAscent + bar.fontBoundingBoxDescent;
    this.context = context;
    this.cellWidth = context.measureText("0").width || size * 0.6;
    // As high as the font's own box, which its lines and blocks fill, so that frames have no gaps.
    this.cellHeight = Math.round(tall >= size && tall <= 1.4 * size ? tall : 1.2 * size);
  }

  isOneCell(character) {
    let fits = this.fits.get(character);
    if (fits === undefined) {
      fits = Math.abs(this.context.measureText(character).width - this.cellWidth) < 0.01;
      this.fits.set(character, fits);
    }
    return fits;
  }

  draw(grid) {
    while (this.element.children.length > grid.height) this.element.lastChild.remove();
    while (this.element.children.length < grid.height) {
      const row = document.createElement("div");
      row.className = "row";
      this.element.append(row);
    }
    for (const y of grid.dirty) {
      const row = this.element.children[y];
      if (!row) continue;
      row.style.height = row.style.lineHeight = `${this.cellHeight}px`;
      row.replaceChildren(...this.runs(grid.rows[y]));
    }
    grid.dirty.clear();
  }

  runs(cells) {
    const runs = [];
    let begin = 0;
    for (let x = 1; x <= cells.length; x++) {
      if (x === cells.length || cells[x][1] !== cells[begin][1]) {
        runs.push(this.run(cells.slice(begin, x)));
        begin = x;
      }
    }
    return runs;
  }

  run(cells) {
    const span = document.createElement("span");
    span.style.height = `${this.cellHeight}px`;
    const style = cells[0][1];
    const [front, back] = style.reverse ? [style.bg || "#0b1118", style.fg || "#c8d3dc"] : [style.fg, style.bg];
    if (front) span.style.color = front;
    if (back) span.style.background = back;
    if (style.bold) span.style.fontWeight = "bold";
    if (style.dim) span.style.opacity = "0.6";
    if (style.italic) span.style.fontStyle = "italic";
    const lines = [style.underline && "underline", style.strike && "line-through"].filter(Boolean);
    if (lines.length) span.style.textDecoration = lines.join(" ");
    let text = "";
    for (const [character] of cells) {
      if (character === "") continue;
      const wide = cellsOf(character) === 2;
      if (!wide && (character <= "~" || this.isOneCell(character))) {
        text += character;
        continue;
      }
      span.append(text);
      text = "";
      const box = document.createElement(wide ? "i" : "b");
      box.textContent = character;
      span.append(box);
    }
    span.append(text);
    return span;
  }
}

// --- input: as xterm sends it ---

const NAMED = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D", Home: "H", End: "F" };
const TILDE = { Insert: 2, Delete: 3, PageUp: 5, PageDown: 6, F5: 15, F6: 17, F7: 18, F8: 19, F9: 20, F10: 21, F11: 23, F12: 24 };
const SIMPLE = { Enter: "\r", Tab: "\t", Escape: "\x1b", Backspace: "\x7f" };

// What a terminal sends for a key; null if the key is text, which comes by the input element, or the browser's own.
function keySequence(event) {
  const modifiers = 1 + (event.shiftKey ? 1 : 0) + (event.altKey ? 2 : 0) + (event.ctrlKey ? 4 : 0);
  if (event.metaKey || event.isComposing) return null;
  if (event.key === "Tab" && event.shiftKey) return "\x1b[Z";
  if (SIMPLE[event.key] !== undefined) return (event.altKey ? "\x1b" : "") + SIMPLE[event.key];
  if (NAMED[event.key]) return modifiers === 1 ? `\x1b[${NAMED[event.key]}` : `\x1b[1;${modifiers}${NAMED[event.key]}`;
  if (TILDE[event.key]) return modifiers === 1 ? `\x1b[${TILDE[event.key]}~` : `\x1b[${TILDE[event.key]};${modifiers}~`;
  const low = /^F([1-4])$/.exec(event.key);
  if (low) return modifiers === 1 ? `\x1bO${"PQRS"[low[1] - 1]}` : `\x1b[1;${modifiers}${"PQRS"[low[1] - 1]}`;
  if (event.key.length !== 1) return null;
  if (event.ctrlKey && !event.altKey) {
    if (event.key === "v" || event.key === "V") return null; // the browser's paste
    const code = event.key.toUpperCase().charCodeAt(0);
    if (event.key === " ") return "\0";
    return code >= 64 && code < 96 ? String.fromCharCode(code - 64) : null;
  }
  return event.altKey && !event.ctrlKey && event.key < "\x7f" ? `\x1b${event.key}` : null;
}

function main() {
  const screen = document.getElementById("screen");
  const input = document.getElementById("input");
  const notice = document.getElementById("notice");
  const tabs = document.getElementById("tabs");
  const secret = secretOf(location.hash);
  history.replaceState(null, "", location.pathname);
  tabs.hidden = secret.view === undefined;
  const painter = new Painter(screen);
  const grid = new Grid(80, 24);
  const decoder = new TextDecoder();
  let socket = null;
  let isOwn = false;
  let isDrawing = false;

  const say = (words) => {
    notice.textContent = words;
    notice.hidden = !words;
  };
  const send = (message) => socket && socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
  // A terminal tells the key Escape from the begin of a sequence by the pause after it, so keys after it wait a moment.
  const waiting = [];
  let isHeld = false;
  const pass = () => {
    isHeld = false;
    while (waiting.length && !isHeld) {
      const text = waiting.shift();
      send({ keys: text });
      isHeld = text === "\x1b";
    }
    if (isHeld) setTimeout(pass, ESCAPE_MS);
  };
  const keys = (text) => {
    if (!isOwn || !text) return;
    waiting.push(text);
    if (!isHeld) pass();
  };
  const draw = () => {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => {
      isDrawing = false;
      painter.draw(grid);
    });
  };
  const size = () => ({
    width: Math.max(20, Math.min(400, Math.floor(screen.clientWidth / painter.cellWidth))),
    height: Math.max(8, Math.min(160, Math.floor(screen.clientHeight / painter.cellHeight))),
  });

  function connect(tab) {
    if (!secret.code && !secret.session && !secret.view) {
      say("This page opens with a link: run `shoal web`, which prints one.");
      return;
    }
    const now = size();
    grid.resize(now.width, now.height);
    if (socket) socket.onclose = null;
    if (socket) socket.close();
    socket = new WebSocket(`ws://${location.host}/screen`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => socket.send(JSON.stringify({ ...secret, ...now, tab }));
    socket.onmessage = (event) => {
      if (typeof event.data === "string") {
        const answer = JSON.parse(event.data);
        isOwn = answer.mode === "own";
        if (isOwn) {
          delete secret.code;
          secret.session = answer.session;
          sessionStorage.setItem("session", answer.session);
        }
        say("");
        return;
      }
      grid.write(decoder.decode(event.data, { stream: true }));
      draw();
    };
    socket.onclose = (event) => say(CLOSED[event.code] || "The connection to `shoal web` was lost. Is it still running? Then reload.");
  }

  for (const button of tabs.querySelectorAll("button")) button.onclick = () => connect(button.dataset.tab);

  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      const now = size();
      if (now.width === grid.width && now.height === grid.height) return;
      grid.resize(now.width, now.height);
      send(now);
    }, 100);
  });

  window.addEventListener("keydown", (event) => {
    if (!isOwn) return;
    const sequence = keySequence(event);
    if (sequence === null) return;
    event.preventDefault();
    keys(sequence);
  });
  input.addEventListener("input", (event) => {
    if (event.isComposing) return;
    keys(input.value.replace(/[\x00-\x1f\x7f]/g, ""));
    input.value = "";
  });
  input.addEventListener("compositionend", () => {
    keys(input.value.replace(/[\x00-\x1f\x7f]/g, ""));
    input.value = "";
  });
  window.addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text").replace(/\r\n?/g, "\n").replace(/[\x00-\x09\x0b-\x1f\x7f]/g, " ");
    event.preventDefault();
    if (text) keys(`\x1b[200~${text.slice(0, 60000)}\x1b[201~`);
  });
  const focus = () => input.focus({ preventScroll: true });
  window.addEventListener("focus", focus);
  document.addEventListener("mouseup", () => setTimeout(() => document.activeElement === input || focus()));

  // Mouse events, as SGR sequences; with shift held, the browser selects text instead.
  let last = "";
  const mouse = (event, button, letter) => {
    if (!isOwn || event.shiftKey) return;
    const area = screen.getBoundingClientRect();
    const x = 1 + Math.floor((event.clientX - area.left) / painter.cellWidth);
    const y = 1 + Math.floor((event.clientY - area.top) / painter.cellHeight);
    if (x < 1 || y < 1 || x > grid.width || y > grid.height) return;
    const modifiers = (event.altKey ? 8 : 0) + (event.ctrlKey ? 16 : 0);
    const sequence = `\x1b[<${button + modifiers};${x};${y}${letter}`;
    if (sequence === last && button >= 32 && button < 64) return; // moved within a cell
    last = sequence;
    keys(sequence);
  };
  screen.addEventListener("mousedown", (event) => {
    screen.classList.toggle("select", event.shiftKey);
    if (!event.shiftKey) event.preventDefault();
    mouse(event, event.button, "M");
  });
  screen.addEventListener("mouseup", (event) => mouse(event, event.button, "m"));
  screen.addEventListener("mousemove", (event) => mouse(event, event.buttons & 1 ? 32 : 35, "M"));
  screen.addEventListener("wheel", (event) => {
    event.preventDefault();
    mouse(event, event.deltaY < 0 ? 64 : 65, "M");
  }, { passive: false });
  screen.addEventListener("contextmenu", (event) => event.shiftKey || event.preventDefault());

  window.shoalScreen = () => grid.text(); // for tests and screen readers' scripts
  focus();
  connect("overview");
}

// The secret of a link, or of this tab's session before it was reloaded.
function secretOf(hash) {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  if (found.get("code")) return { code: found.get("code") };
  if (found.get("view")) {
    sessionStorage.setItem("view", found.get("view"));
    return { view: found.get("view") };
  }
  const [session, view] = [sessionStorage.getItem("session"), sessionStorage.getItem("view")];
  return session ? { session } : view ? { view } : {};
}

if (typeof document !== "undefined") main();
if (typeof module !== "undefined") module.exports = { Grid, cellsOf, keySequence };
