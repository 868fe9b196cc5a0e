// The time of a call of a page's network for one picture, in ms: the best of many drawings of many steps. In Node:
// node speed.js PAGE.html; speed.py also runs it in Chromium.
"use strict";

async function timeOfCall(held, calls = 50, drawings = 25) {
    const bytesOf = base64 => Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
    const nothing = () => 0, fail = () => { throw new Error("the network can't be loaded"); };
    const { instance } = await WebAssembly.instantiate(bytesOf(held.network), {
        page: { fail },
        wasi_snapshot_preview1: { fd_close: nothing, fd_seek: nothing, fd_write: nothing },
    });
    const network = instance.exports;
    const lend = bytes => {
        const at = network.allocate(bytes.length);
        new Uint8Array(network.memory.buffer).set(bytes, at);
        return [at, bytes.length];
    };
    network._initialize();
    network.configure(...lend(new TextEncoder().encode(`${held.config}sampler = ddim\nsample_steps = ${calls}\n`)));
    network.load(...lend(bytesOf(held.weights)), held.crc32, 1);
    network.requests(1);

    let best = Infinity;
    for (let drawing = 0; drawing < drawings; drawing++) {  // during the first V8 compiles the network again, for speed
        const begun = performance.now();
        network.start();
        while (network.step(0)) {}
        best = Math.min(best, (performance.now() - begun) / calls);
    }
    return best;
}

if (typeof require !== "undefined") {
    const page = require("fs").readFileSync(process.argv[2], "utf8");
    const held = JSON.parse(page.match(/<script id="model" type="application\/json">(.*?)<\/script>/s)[1]);
    timeOfCall(held).then(time => console.log(time));
}
