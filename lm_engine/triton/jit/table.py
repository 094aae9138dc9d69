"""What a mixed step does with the request table: writes rows, gathers the step's inputs, puts embeddings into
their spans, pads all of it for a graph, writes drawn tokens.

Shapes: T tokens of a sequence or step, A position axes, M blocks of a sequence, H hidden, R rows.
"""

import triton
import triton.language as tl


@triton.jit
def _load_long(ptr):
    """Of two words, the lower one first."""
    return (tl.load(ptr + 1).to(tl.int64) << 32) | (tl.load(ptr).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def write_rows(
    packed_ptr,
    token_table_ptr,
    positions_ptr,
    block_tables_ptr,
    num_prompt_ptr,
    top_k_ptr,
    seed_ptr,
    position_delta_ptr,
    floats_ptr,
    gated_from_ptr,
    token_stride,
    position_stride,
    axis_stride,
    table_stride,
    A: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (item, chunk of it). `packed` begins with the items' headers, as `triton/table.py` lays them
    out; at `data` lie an item's tokens, positions [A, prompt] and blocks. One without tokens appends blocks
    alone."""
    header_ptr = packed_ptr + tl.program_id(0) * HEADER
    slot = tl.load(header_ptr).to(tl.int64)
    num_tokens = tl.load(header_ptr + 1)
    num_prompt = tl.load(header_ptr + 2)
    num_blocks = tl.load(header_ptr + 3)
    first_column = tl.load(header_ptr + 4)
    data_ptr = packed_ptr + tl.load(header_ptr + 5)
    places_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_T = places_T < num_tokens
    token_T = tl.load(data_ptr + places_T, mask=inside_T, other=0)
    tl.store(token_table_ptr + slot * token_stride + places_T, token_T, mask=inside_T)
    data_ptr += num_tokens
    inside_T = places_T < num_prompt
    for axis in tl.static_range(A):
        bits_T = tl.load(data_ptr + places_T, mask=inside_T, other=0)
        targets_T = positions_ptr + axis * axis_stride + slot * position_stride + places_T
        tl.store(targets_T, bits_T.to(tl.float32, bitcast=True), mask=inside_T)
        data_ptr += num_prompt
    inside_T = places_T < num_blocks
    block_T = tl.load(data_ptr + places_T, mask=inside_T, other=0)
    tl.store(block_tables_ptr + slot * table_stride + first_column + places_T, block_T, mask=inside_T)
    if (tl.program_id(1) == 0) & (num_tokens > 0):
        tl.store(num_prompt_ptr + slot, num_prompt.to(tl.int64))
        if gated_from_ptr is not None:
            tl.store(gated_from_ptr + slot, tl.load(header_ptr + 6))
        tl.store(position_delta_ptr + slot, tl.load(header_ptr + 7).to(tl.float32, bitcast=True))
        tl.store(seed_ptr + slot, _load_long(header_ptr + 8))
        tl.store(top_k_ptr + slot, _load_long(header_ptr + 10))
        for i in tl.static_range(NUM_FLOATS):
            value = tl.load(header_ptr + 12 + i).to(tl.float32, bitcast=True)
            tl.store(floats_ptr + slot * NUM_FLOATS + i, value)


@triton.jit(do_not_specialize=["chunks_at", "num_tokens", "num_blocks"])
def gather_inputs(
    packed_ptr,
    token_table_ptr,
    positions_ptr,
    num_prompt_ptr,
    position_delta_ptr,
    gated_from_ptr,
    block_tables_ptr,
    token_ids_ptr,
    step_positions_ptr,
    slot_mapping_ptr,
    gate_ptr,
    step_tables_ptr,
    chunks_at,
    num_tokens,
    num_blocks,
    token_stride,
    position_stride,
    axis_stride,
    table_stride,
    A: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A chunk of a sequence's tokens a program. From `chunks_at` on `packed` has five numbers of each: slot,
    sequence index and step row of its first token, number of tokens, the sequence's row of the step's block
    tables (-1: another chunk copies it)."""
    chunk_ptr = packed_ptr + chunks_at + tl.program_id(0) * 5
    slot = tl.load(chunk_ptr).to(tl.int64)
    first_index = tl.load(chunk_ptr + 1)
    first_token = tl.load(chunk_ptr + 2)
    count = tl.load(chunk_ptr + 3)
    row = tl.load(chunk_ptr + 4).to(tl.int64)
    offsets_T = tl.arange(0, BLOCK_T)
    inside_T = offsets_T < count
    index_T = first_index + offsets_T
    places_T = first_token + offsets_T
    token_T = tl.load(token_table_ptr + slot * token_stride + index_T, mask=inside_T, other=0)
    tl.store(token_ids_ptr + places_T, token_T.to(tl.int64), mask=inside_T)
    generated_T = index_T >= tl.load(num_prompt_ptr + slot)
    moved_T = index_T.to(tl.float32) + tl.load(position_delta_ptr + slot)
    for axis in tl.static_range(A):
        known_ptrs_T = positions_ptr + axis * axis_stride + slot * position_stride + index_T
        known_T = tl.load(known_ptrs_T, mask=inside_T, other=0.0)
        position_T = tl.where(generated_T, moved_T, known_T)
        tl.store(step_positions_ptr + axis * num_tokens + places_T, position_T, mask=inside_T)
    table_ptr = block_tables_ptr + slot * table_stride
    block_T = tl.load(table_ptr + index_T // BLOCK_SIZE, mask=inside_T, other=0).to(tl.int64)
    tl.store(slot_mapping_ptr + places_T, block_T * BLOCK_SIZE + index_T % BLOCK_SIZE, mask=inside_T)
    if gate_ptr is not None:
        gate_T = (index_T >= tl.load(gated_from_ptr + slot)).to(tl.float32)
        tl.store(gate_ptr + places_T, gate_T, mask=inside_T)
    if row >= 0:
        for start in tl.range(0, num_blocks, BLOCK_M):
            columns_M = start + tl.arange(0, BLOCK_M)
            inside_M = columns_M < num_blocks
            block_M = tl.load(table_ptr + columns_M, mask=inside_M, other=0)
            tl.store(step_tables_ptr + row * num_blocks + columns_M, block_M, mask=inside_M)


@triton.jit(do_not_specialize=["num_tokens"])
def place_spans(
    pieces_ptr,
    hidden_ptr,
    deepstack_ptr,
    num_tokens,
    H: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (piece, row of it). `pieces` has five numbers of each: the address of its first row, which is
    one of 16 bytes, the distance of its rows in values, their number, the step row of the first, whether they
    have deepstack features."""
    piece_ptr = pieces_ptr + tl.program_id(0) * 5
    row = tl.program_id(1).to(tl.int64)
    if row < tl.load(piece_ptr + 2):
        source_ptr = tl.load(piece_ptr).to(tl.pointer_type(hidden_ptr.dtype.element_ty))
        source_ptr = tl.multiple_of(source_ptr, 16) + row * tl.load(piece_ptr + 1)
        place = tl.load(piece_ptr + 3) + row
        dims_H = tl.arange(0, BLOCK_H)
        inside_H = dims_H < H
        tl.store(hidden_ptr + place * H + dims_H, tl.load(source_ptr + dims_H, mask=inside_H), mask=inside_H)
        if tl.load(piece_ptr + 4) != 0:
            for level in tl.static_range(LEVELS):
                level_H = tl.load(source_ptr + (level + 1) * H + dims_H, mask=inside_H)
                target_ptr = deepstack_ptr + (level * num_tokens + place) * H
                tl.store(target_ptr + dims_H, level_H, mask=inside_H)


@triton.jit(
    do_not_specialize=[
        *("num_used", "num_tokens", "num_rows", "num_blocks", "max_rows"),
        *("axis_stride", "table_stride"),
    ]
)
def pad_inputs(
    hidden_ptr,
    positions_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    tables_ptr,
    gate_ptr,
    padded_hidden_ptr,
    padded_positions_ptr,
    padded_slots_ptr,
    padded_starts_ptr,
    padded_lengths_ptr,
    padded_tables_ptr,
    padded_gate_ptr,
    num_used,
    num_tokens,
    num_rows,
    num_blocks,
    axis_stride,
    table_stride,
    max_rows,
    padded_axis_stride,
    padded_table_stride,
    A: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A token and a row a program, of which there are as many as the padded step has of either, and one more
    row's start."""
    place = tl.program_id(0)
    if place < num_tokens:
        used = place < num_used
        dims_H = tl.arange(0, BLOCK_H)
        inside_H = dims_H < H
        hidden_H = tl.load(hidden_ptr + place.to(tl.int64) * H + dims_H, mask=inside_H & used, other=0.0)
        tl.store(padded_hidden_ptr + place.to(tl.int64) * H + dims_H, hidden_H, mask=inside_H)
        for axis in tl.static_range(A):
            position = tl.load(positions_ptr + axis * axis_stride + place, mask=used, other=0.0)
            tl.store(padded_positions_ptr + axis * padded_axis_stride + place, position, mask=used)
        tl.store(padded_slots_ptr + place, tl.load(slots_ptr + place, mask=used, other=0))
        if gate_ptr is not None:
            tl.store(padded_gate_ptr + place, tl.load(gate_ptr + place, mask=used, other=0.0))
    if place <= max_rows:
        start = tl.load(starts_ptr + place, mask=place <= num_rows, other=0)
        tl.store(padded_starts_ptr + place, tl.where(place <= num_rows, start, num_used))
    if place < max_rows:
        length = tl.load(lengths_ptr + place, mask=place < num_rows, other=0)
        tl.store(padded_lengths_ptr + place, length)
    if place < num_rows:
        for first in tl.range(0, num_blocks, BLOCK_M):
            columns_M = first + tl.arange(0, BLOCK_M)
            inside_M = columns_M < num_blocks
            block_M = tl.load(tables_ptr + place.to(tl.int64) * table_stride + columns_M, mask=inside_M)
            places_M = padded_tables_ptr + place.to(tl.int64) * padded_table_stride + columns_M
            tl.store(places_M, block_M, mask=inside_M)


@triton.jit(do_not_specialize=["num_rows", "drawn_stride"])
def write_tokens(
    drawn_ptr,
    slots_ptr,
    index_ptr,
    token_table_ptr,
    num_rows,
    drawn_stride,
    token_stride,
    BLOCK_R: tl.constexpr,
):
    """The token that each row has drawn to its place in the table."""
    rows_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside_R = rows_R < num_rows
    slot_R = tl.load(slots_ptr + rows_R, mask=inside_R, other=0)
    index_R = tl.load(index_ptr + rows_R, mask=inside_R, other=0)
    token_R = tl.load(drawn_ptr + rows_R.to(tl.int64) * drawn_stride, mask=inside_R, other=0)
    tl.store(token_table_ptr + slot_R * token_stride + index_R, token_R.to(tl.int32), mask=inside_R)
