"""Tiny gfx942 code objects from assembly text, for tests that need exact instructions."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from pyfa.backends.hip import compiler

HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
.amdhsa_code_object_version 5
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.Lend:
.size {name}, .Lend-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr 512
  .amdhsa_accum_offset 256
  .amdhsa_next_free_sgpr 96
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_vgpr_workitem_id 0
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_ieee_mode 1
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 32
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: 512
    .agpr_count: 256
    .max_flat_workgroup_size: 1024
    .args:
      - {{.size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 16, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 24, .value_kind: by_value}}
.end_amdgpu_metadata
"""


def assemble(body: str, *, lds: int = 0, scratch: int = 0, name: str = "test") -> bytes:
    """A code object of one kernel: s[0:1] is the kernarg pointer, s2 the workgroup, v0 the lane."""
    zig = compiler.zig()
    assert zig is not None
    text = HEADER.format(name=name, body=body, lds=lds, scratch=scratch)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "t.s").write_text(text)
        for arguments in (
            [
                "clang",
                "-x",
                "assembler",
                "-target",
                "amdgcn-amd-amdhsa",
                "-mcpu=gfx942",
                "-c",
                "t.s",
                "-o",
                "t.o",
            ],
            ["ld.lld", "-shared", "t.o", "-o", "t.hsaco"],
        ):
            done = subprocess.run(
                [str(zig), *arguments], cwd=folder, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[:4000]
        return Path(folder, "t.hsaco").read_bytes()
