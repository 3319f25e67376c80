"use strict";
// Colours that can be seen, by the contrast of WCAG 2.2, as megatron_rl/observe/picture_style.py has it.

const READABLE = 4.5;

/** Red, green and blue of #rrggbb, 0 to 255. */
const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

/** Relative luminance: 0 is black, 1 is white. */
function luminance(color) {
  const [red, green, blue] = parts(color).map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** From 1, equal, to 21, black and white. */
function contrast(one, other) {
  const [darker, lighter] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (lighter + 0.05) / (darker + 0.05);
}

/** The colour of text on a colour. */
const textOn = (color) => (contrast("#ffffff", color) >= contrast("#1f2933", color) ? "#ffffff" : "#1f2933");

/** A colour on a background: on a dark one with as much white as it needs to be seen, on a light one as it is. */
function seenOn(color, background) {
  if (luminance(background) > 0.5) return color;
  for (let white = 0; white < 1; white += 0.05) {
    const mixed = `#${parts(color).map((part) => Math.round(part + (255 - part) * white).toString(16).padStart(2, "0")).join("")}`;
    if (contrast(mixed, background) >= READABLE) return mixed;
  }
  return "#ffffff";
}
