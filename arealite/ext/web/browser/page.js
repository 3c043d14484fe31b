// Describes a page as text and prepares actions on it. Injected into every frame before the page's own
// scripts, so that it can record which elements listen for clicks.
(() => {
  if (window.__arealite) return;
  const CLICKS = new Set(["click", "dblclick", "mousedown", "mouseup", "pointerdown", "pointerup"]);
  const UNSEEN = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "OPTION"]);
  const SHAPES = new Set(["rect", "circle", "ellipse", "polygon", "polyline", "line", "path", "image", "text"]);
  const ROLES = /^(button|link|checkbox|radio|tab|menuitem|option|switch|treeitem|textbox|combobox)$/;
  const SET_AT_ONCE = /^(date|time|month|week|color|range|datetime-local)$/;
  const NO_TEXT = /^(button|checkbox|file|hidden|image|radio|reset|submit)$/;
  const MAX_NAME = 120;

  const listening = new WeakSet();
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (CLICKS.has(type) && this.nodeType === 1) listening.add(this);
    return add.call(this, type, ...rest);
  };
  window.open = (url) => (url && location.assign(url), null); // open in the only tab
  add.call(document, "click", (event) => {
    event.target.closest?.("[target]:not(iframe)")?.removeAttribute("target");
  }, true);
  add.call(window, "beforeunload", () => { leaving = true; });

  let leaving = false, stopped = () => {};
  let items = [];
  // Resolves when a navigation was stopped. A navigation that succeeds ends all scripts of the page.
  const left = () => new Promise((resolve) => { stopped = resolve; if (!leaving) resolve(); });
  const stay = () => { leaving = false; stopped(); };

  const clean = (text) => {
    const words = (text || "").replace(/\s+/g, " ").trim();
    return words.length > MAX_NAME ? words.slice(0, MAX_NAME) + "…" : words;
  };
  const quote = (text) => JSON.stringify(clean(text)).replace(/\\"/g, '"');
  const shown = (element) => {
    const style = element.ownerDocument.defaultView.getComputedStyle(element);
    return style.display === "none" ? null : style;
  };
  const listens = (element) =>
    element.ownerDocument.defaultView.__arealite?.listening.has(element) || element.onclick ||
    element.onmousedown || element.tabIndex >= 0;

  // Offset of a frame in the page.
  const frameOffset = (view) => {
    let x = 0, y = 0;
    for (; view !== window && view.frameElement; view = view.parent) {
      const frame = view.frameElement, box = frame.getBoundingClientRect();
      x += box.left + frame.clientLeft;
      y += box.top + frame.clientTop;
    }
    return [x, y];
  };

  const kind = (element) => {
    const role = element.getAttribute("role");
    if (role && ROLES.test(role)) return role;
    switch (element.tagName) {
      case "A": return element.href ? "link" : "";
      case "BUTTON": return "button";
      case "SELECT": return "select";
      case "TEXTAREA": return "textbox";
      case "INPUT": return { text: "textbox", submit: "button" }[element.type] || element.type;
      default: return element.isContentEditable && !element.parentElement?.isContentEditable ? "textbox" : "";
    }
  };
  const name = (element) => clean(
    element.getAttribute("aria-label") || element.labels?.[0]?.innerText ||
    (/^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName) ? "" : element.innerText ?? element.textContent) ||
    (/^(submit|button|reset)$/.test(element.type) ? element.value : "") ||
    element.placeholder || element.title || element.alt || "");

  // The line of a form control: kind, name, value and state.
  const controlLine = (element, role) => {
    const words = [role, name(element) && quote(name(element))];
    if (role === "select") {
      const texts = [...element.options].map((option) => quote(option.text));
      const chosen = [...element.selectedOptions].map((option) => quote(option.text));
      words.push(`= ${chosen.join(", ")} of ${texts.slice(0, 50).join(" | ")}`);
    } else if (/^(checkbox|radio)/.test(role)) {
      words.push((element.checked ?? element.ariaChecked === "true") && "checked");
    } else if (!/^(button|reset|file)$/.test(role) && element.value && element.tagName !== "LI") {
      words.push(`= ${quote(element.value)}`);
    }
    words.push(element.disabled && "disabled", element === element.ownerDocument.activeElement && "focused");
    return words.filter(Boolean).join(" ");
  };
  // Whether a label's text already appears as the name of its control.
  const namesControl = (label) => {
    const control = label?.control;
    return control && control.labels[0] === label && shown(control) && control.getClientRects().length &&
      !control.getAttribute("aria-label");
  };
  const classes = (element) => [...element.classList].slice(0, 2).map((each) => " ." + each).join("");
  // Colour, position and size, which describe an element without text.
  const looks = (element, style, box) => {
    const colour = [element.getAttribute("fill") || style.fill, style.backgroundColor][+!element.ownerSVGElement];
    const fill = colour && !/^(rgba\(0, 0, 0, 0\)|none)$/.test(colour) ? ` ${colour.replace(/\s/g, "")}` : "";
    return `${fill} at ${Math.round(box.x)},${Math.round(box.y)} size ${Math.round(box.width)}x${Math.round(box.height)}`;
  };

  class Full extends Error {}

  class Description {
    constructor(limit, skip) {
      Object.assign(this, { lines: [], length: 0, limit, skip, outside: 0, choices: [] });
    }
    add(line) {
      this.length += line.length + 1;
      if (this.length > this.limit) throw new Full();
      this.lines.push(line);
    }
    item(element, words) {
      this.add(`[${items.length}] ${words}`);
      this.choices.push(`click [${items.length}]`);
      for (const option of (element.tagName === "SELECT" ? element.options : []))
        this.choices.push(`select [${items.length}] [${clean(option.text)}]`);
      items.push(element);
    }
    inside(box, view) {
      const [x, y] = frameOffset(view);
      const seen = box.bottom + y > 0 && box.top + y < innerHeight && box.right + x > 0 && box.left + x < innerWidth;
      this.outside += !seen;
      return seen;
    }
    children(node) {
      for (const child of node.childNodes) {
        if (child.nodeType === 1) this.element(child);
        else if (child.nodeType === 3 && clean(child.data)) this.text(child);
      }
    }
    text(node) {
      const range = node.ownerDocument.createRange();
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect(), view = node.ownerDocument.defaultView;
      const style = view.getComputedStyle(node.parentElement || node.getRootNode().host);
      if (namesControl(node.parentElement?.closest("label"))) return;
      if (box.width && style.visibility === "visible" && this.inside(box, view)) this.add(clean(node.data));
    }
    element(element) {
      if (UNSEEN.has(element.tagName) || (this.skip && element.matches(this.skip))) return;
      const style = shown(element);
      if (!style) return;
      const frame = element.tagName === "IFRAME" && element.contentDocument?.body;
      if (frame) return this.children(frame);
      const box = element.getBoundingClientRect(), view = element.ownerDocument.defaultView;
      const visible = style.visibility === "visible" && box.width && box.height;
      const role = kind(element), tag = element.tagName.toLowerCase();
      if (role) {
        if (visible && this.inside(box, view)) this.item(element, controlLine(element, role));
        return;
      }
      if (tag === "label" && namesControl(element)) return this.children(element);
      const leaf = ![...element.children].some((child) => !UNSEEN.has(child.tagName) && child.tagName !== "BR");
      if (!visible || (!leaf && !listens(element)) || element.shadowRoot) {
        this.children(element.shadowRoot || element);
      } else if (!leaf) {
        if (this.inside(box, view)) this.item(element, tag + classes(element));
        this.children(element);
      } else if (name(element)) {
        const more = tag === "text" ? looks(element, style, box) : "";
        if (this.inside(box, view)) this.item(element, `${tag} ${quote(name(element))}${more}`);
      } else if (SHAPES.has(tag) || /^(img|canvas)$/.test(tag) || listens(element) ||
                 !/^rgba\(0, 0, 0, 0\)$/.test(style.backgroundColor)) {
        if (this.inside(box, view)) this.item(element, tag + classes(element) + looks(element, style, box));
      }
    }
  }

  const describe = async ({ limit, skip, names, settle }) => {
    if (settle) await new Promise((resolve) => setTimeout(resolve, settle));
    if (leaving) return { leaving };
    items = [null];
    const page = new Description(limit, skip);
    let cut = "";
    try {
      if (document.body) page.children(document.body);
    } catch (error) {
      if (!(error instanceof Full)) throw error;
      cut = "(the page is cut here: it is longer)";
    }
    if (!cut && page.outside) cut = `(${page.outside} more outside the window: scroll)`;
    return {
      text: [...page.lines, cut].filter(Boolean).join("\n"), choices: page.choices,
      title: document.title, url: location.href, state: (names || []).map((name) => window[name] ?? null),
    };
  };

  const fire = (element, ...types) => types.forEach((type) => element.dispatchEvent(new Event(type, { bubbles: true })));

  // Return the point for a real mouse click. If the element is covered, click it by script.
  const click = (element) => {
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    const box = element.getClientRects()[0] || element.getBoundingClientRect();
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    const hit = element.getRootNode().elementFromPoint?.(x, y);
    const [left, top] = frameOffset(element.ownerDocument.defaultView);
    if (hit && (element.contains(hit) || hit.closest("label")?.control === element)) return { at: [x + left, y + top] };
    const options = { bubbles: true, cancelable: true, composed: true, view: window, clientX: x, clientY: y };
    for (const type of ["mousedown", "mouseup"]) element.dispatchEvent(new MouseEvent(type, options));
    element.focus?.();
    if (element.click) element.click();
    else element.dispatchEvent(new MouseEvent("click", options));
    return {};
  };
  const type = (element, text, id) => {
    const input = /^(INPUT|TEXTAREA)$/.test(element.tagName);
    if ((!input && !element.isContentEditable) || element.disabled || element.readOnly ||
        (element.tagName === "INPUT" && NO_TEXT.test(element.type))) return { error: `[${id}] takes no text` };
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    element.focus();
    if (SET_AT_ONCE.test(element.type)) {
      element.value = text;
      fire(element, "input", "change");
      return element.value === text ? {} : { error: `[${id}] takes no ${JSON.stringify(text)}, it is of type ${element.type}` };
    }
    if (input) element.select();
    else element.ownerDocument.getSelection().selectAllChildren(element);
    return { keys: text };
  };
  const select = (element, text, id) => {
    if (element.tagName !== "SELECT") return { error: `[${id}] has no options to select, try click` };
    const wanted = clean(text).toLowerCase();
    const option = [...element.options].find((each) => [clean(each.text), each.value].some((one) => one.toLowerCase() === wanted));
    if (!option) return { error: `[${id}] has no option ${JSON.stringify(text)}` };
    option.selected = element.multiple ? !option.selected : true;
    fire(element, "input", "change");
    return {};
  };
  const scroll = (element, text) => {
    const whole = document.scrollingElement || document.body;
    let target = element || whole;
    while (target && target !== whole && target.scrollHeight <= target.clientHeight) target = target.parentElement;
    target ||= whole;
    const height = target === whole ? innerHeight : target.clientHeight;
    target.scrollBy({ top: (text === "up" ? -0.8 : 0.8) * height, behavior: "instant" });
    return {};
  };

  const act = (verb, id, text) => {
    const element = id === null ? null : items[id];
    const isPresent = element?.isConnected && element.ownerDocument.defaultView;  // null if its frame was removed
    if (id !== null && !isPresent) return { error: `there is no [${id}] on this page` };
    return { click, type, select, scroll }[verb](element, text, id);
  };

  Object.defineProperty(window, "__arealite", { value: { describe, act, left, stay, listening } });
})();
