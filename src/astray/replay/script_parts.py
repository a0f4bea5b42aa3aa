"""What every exported script has: how it reads its file, measures errors and reports. Fed to `script.py`.

Errors are measured as `judging.py` does, so that a script and `astray replay` give the same numbers; a person who
changes one changes the other.
"""

from __future__ import annotations

LAID_OUT = '''
def laid_out(values, shape, stride):
    """The values in memory as the call had them."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
    memory = values.new_zeros(size)
    memory.as_strided(values.shape, stride).copy_(values)
    return memory.as_strided(shape, stride)
'''

READ = '''
def read(path):
    """The tensors of a safetensors file: a header in JSON, then their bytes."""
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors, data = {}, torch.frombuffer(raw, dtype=torch.uint8)[start:]
    for name, entry in json.loads(raw[8:start]).items():
        first, last = entry["data_offsets"]
        values = data[first:last].view(DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors
'''

ULPS = '''
def ulps(result, exact, dtype):
    """How far off each element is, in spacings of the numbers of its dtype.

    A sum that cancels is as far off as its terms are, so the spacing is no less than at
    the root mean square of the row. Infinity counts as the largest number.
    """
    info = torch.finfo(dtype)
    columns = 1
    for size in reversed(exact.shape):
        columns *= size if columns < 16 else 1
    sizes = torch.where(exact.isfinite(), exact, 0.0).abs()
    rows = sizes.reshape(-1, columns).square().mean(1, keepdim=True).sqrt()
    sizes = torch.maximum(sizes, rows.expand(-1, columns).reshape(exact.shape))
    exponents = torch.frexp(sizes.clamp(min=info.tiny)).exponent
    spacing = torch.ldexp(torch.full_like(sizes, info.eps), exponents - 1)
    # The smallest numbers of float32 and bfloat16 may be flushed to zero.
    flushed = dtype in (torch.float32, torch.bfloat16)
    spacing = spacing.clamp(min=info.tiny * (2 if flushed else info.eps))
    result, exact = (each.clamp(-info.max, info.max) for each in (result, exact))
    errors = torch.where(result.isnan() & exact.isnan(), 0.0, (result - exact).abs())
    return (errors / spacing).nan_to_num(nan=float("inf"))
'''

_OFF = '''
def off(label, result, exact, dtype, most, most_rms):
    """Prints how far off a result is. Whether rounding does not explain it."""
    <integers>
    result, exact = result.double(), exact.double()
    errors = ulps(result, exact, dtype)
    largest, rms = errors.max().item(), errors.square().mean().sqrt().item()
    at = tuple((errors == largest).nonzero()[0].tolist())
    print(f"  {label}  {largest:.4g} ulps off at most, root mean square {rms:.3g}")
    if largest:
        worst = f"{result[at]:.6g}, exact {exact[at]:.9g}"
        print(f"            worst at {list(at)}: {worst}")
    beyond = (errors > most).nonzero()
    if len(beyond):
        ends = zip(beyond.amin(0).tolist(), (beyond.amax(0) + 1).tolist())
        place = ", ".join(f"{first}:{end}" for first, end in ends)
        print(f"            {len(beyond):,} elements beyond {most:.3g}, in [{place}]")
    return largest > most or rms > most_rms
'''

_INTEGERS = """
    if not dtype.is_floating_point:
        count = int((result != exact).sum())
        print(f"  {label}  {count:,} elements are wrong")
        return count > 0
"""

_MAIN = '''
def bits(tensor):
    """The bytes of each element."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1, 1).view(torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cpu")
    device = parser.parse_args().device
    <drawing>
    tensors = read(FILE)
    print(__doc__.splitlines()[0])
    print(f"  recorded  {RECORDED}")
    print(f"  here      torch {torch.__version__} on {device}")
    try:
        exact = compute(tensors, torch.device("cpu"), exact=True)
        here = compute(tensors, device, exact=False)
    except Exception as error:  # whatever torch has to say
        print(f"\\nIt does not run on {device}: {error}")
        return 125

    recorded_off = here_off = False
    different = 0
    for name, (dtype, most, most_rms) in RESULTS.items():
        recorded, true = tensors[f"recorded.{name}"], exact[name].detach()
        result = here[name].detach().cpu()
        print(f"\\n{name}, {recorded.dtype} {list(recorded.shape)}", end="; ")
        print(f"rounding explains {most:.3g} ulps, root mean square {most_rms:.3g}")
        recorded_off |= off("recorded", recorded, true, dtype, most, most_rms)
        here_off |= off("here    ", result, true, dtype, most, most_rms)
        unequal = bits(recorded) != bits(result.to(recorded.dtype))
        different += int(unequal.any(1).sum())

    said = ("as exact as rounding allows", "further off than rounding explains")
    same = "to the bit" if not different else f"but for {different:,} elements"
    print(f"\\nRecorded: {said[recorded_off]}. Here: {said[here_off]}.")
    print(f"This device gives what was recorded, {same}.")
    return int(here_off)


if __name__ == "__main__":
    sys.exit(main())
'''

_DRAWING = """
    if device.type != "cpu":
        parser.error("the random numbers are the CPU's, and drawn there alone")
"""


def off(integers: bool) -> str:
    """What judges a result. integers: whether there are results that are not rounded."""
    return _OFF.replace("    <integers>\n", _INTEGERS.lstrip("\n") if integers else "")


def main(draws: bool) -> str:
    """What runs it all. draws: whether the call draws random numbers."""
    return _MAIN.replace("    <drawing>\n", _DRAWING.lstrip("\n") if draws else "")
