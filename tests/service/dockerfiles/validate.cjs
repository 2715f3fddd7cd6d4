// Prints what is wrong with each Dockerfile that is named, as FILE:LINE: text.
const fs = require("fs");
const { validate } = require("dockerfile-utils");

for (const file of process.argv.slice(2)) {
    for (const found of validate(fs.readFileSync(file, "utf8"), { instructionJSONInSingleQuotes: 2 })) {
        console.log(`${file}:${found.range.start.line + 1}: ${found.message}`);
    }
}
