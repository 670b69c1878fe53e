// Draws the block pool as a map of cells. Shared blocks have the colour of their prefix.

const SHARED = 3; // the kinds are 0 free, 1 cached, 2 held, 3 shared

export function showBlocks(canvas, blocks) {
  const colour = colours(canvas);
  const fills = [colour("--free"), colour("--cached"), colour("--held")];
  const groups = Array.from({ length: 9 }, (_, index) => colour(index ? `--g${index}` : "--held"));
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const total = blocks.kinds.length;
  const pitch = largestPitch(width, height, total);
  const columns = Math.max(1, Math.floor(width / pitch));
  const size = pitch > 4 ? pitch - 1.5 : pitch * 0.8;
  const radius = Math.min(2, size / 4);
  blocks.kinds.forEach((kind, index) => {
    context.fillStyle = kind === SHARED ? groups[blocks.groups[index]] : fills[kind];
    context.beginPath();
    context.roundRect((index % columns) * pitch, Math.floor(index / columns) * pitch, size, size, radius);
    context.fill();
  });
  const [free, cached, held, shared] = blocks.counts;
  canvas.setAttribute(
    "aria-label",
    `Block pool: ${held} held, ${shared} shared, ${cached} cached and ${free} free of ${blocks.num_blocks}`,
  );
}

/** Reads colours of the theme as a canvas understands them. */
function colours(canvas) {
  const style = getComputedStyle(canvas);
  return (name) => {
    canvas.style.color = `var(${name})`;
    const found = style.color;
    canvas.style.color = "";
    return found;
  };
}

/** The largest size of a cell with which all cells fit. */
function largestPitch(width, height, total) {
  let pitch = Math.min(14, Math.sqrt((width * height) / Math.max(1, total)));
  while (pitch > 1 && Math.ceil(total / Math.floor(width / pitch)) * pitch > height) pitch *= 0.98;
  return pitch;
}

