"""The weights of the benchmark, equal for all engines: SmolLM2's, dequantised and rounded to float16 once.

Two forms: a GGUF file of float16 for llama.cpp, and a Hugging Face directory of float32 with the same values.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from jaxsp.model.hf_weights import export_hf
from jaxsp.model.source import load_params, open_model, tokenizer_path

_FILE_TYPE = gguf.Keys.General.FILE_TYPE


def write_float16(source: Path, target: Path) -> None:
    """Writes the GGUF file `source` as `target` with matrices in float16 and vectors in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (gguf.Keys.General.ARCHITECTURE, _FILE_TYPE):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def write_weights(name: str, gguf_path: Path, model_dir: Path) -> None:
    """Writes both forms of the model called `name`, which is a GGUF file, where they do not exist yet."""
    if not gguf_path.exists():
        gguf_path.parent.mkdir(parents=True, exist_ok=True)
        write_float16(open_model(name).path, gguf_path)
    if not model_dir.exists():
        source = open_model(str(gguf_path))
        params = load_params(source)
        export_hf(params, source.sizes, source.config, model_dir, tokenizer_from=tokenizer_path(source))


if __name__ == "__main__":
    write_weights(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
