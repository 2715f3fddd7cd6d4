for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    // Unlike navigator.clipboard, this also works on pages loaded over plain HTTP.
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  });
}

function request(form) {
  const headers = { "Content-Type": "application/json" };
  const key = form.querySelector("input");
  if (key) headers[key.name] = key.value;
  const text = new TextEncoder().encode(form.querySelector("textarea").value);
  const zeros = Number(form.dataset.zeros);
  if (zeros) headers["Inference-Header-Content-Length"] = text.length;
  return { method: "POST", headers, body: new Blob([text, new Uint8Array(zeros)]) };
}

async function show(answer, output) {
  output.textContent = `${answer.status} ${answer.statusText}\n`;
  const size = answer.headers.get("Inference-Header-Content-Length");
  if (size) {
    const bytes = await answer.arrayBuffer();
    const json = new TextDecoder().decode(bytes.slice(0, size));
    output.textContent += `${json}\nfollowed by ${bytes.byteLength - size} bytes of tensors`;
    return;
  }
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    output.textContent += decoder.decode(part.value, { stream: true });
  }
}

for (const form of document.querySelectorAll("form")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const output = form.querySelector("output");
    output.textContent = "…";
    try {
      await show(await fetch(form.getAttribute("action"), request(form)), output);
    } catch (error) {
      output.textContent += `\n${error}`;
    }
  });
}
