"""The structs and functions of the module against the C header."""

import ctypes
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
from sqz import _builder, _library

HEADER = ROOT / "libruntime/include"
STRUCTS = [one for one in vars(_library).values() if "c_name" in vars(one if isinstance(one, type) else type(None))]


def layout(struct):
    return [ctypes.sizeof(struct), *(number for name, _ in struct._fields_
                                     for number in (getattr(struct, name).offset, getattr(struct, name).size))]


def test_structs_are_those_of_the_header(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    assert len(STRUCTS) == 9
    prints = []
    for struct in STRUCTS:
        prints.append(f'printf("%zu", sizeof({struct.c_name}));')
        prints += [f'printf(" %zu %zu", offsetof({struct.c_name}, {name}), sizeof((({struct.c_name}*)0)->{name}));'
                   for name, _ in struct._fields_]
        prints.append('printf("\\n");')
    source = tmp_path / "layout.c"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "sqz/sqz.h"\nint main(void) {\n' +
                      "\n".join(prints) + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-std=c99", f"-I{HEADER}", source, "-o", tmp_path / "layout"], check=True)
    lines = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert {struct.c_name: layout(struct) for struct in STRUCTS} == \
        {struct.c_name: [int(number) for number in line.split()] for struct, line in zip(STRUCTS, lines)}


def test_arguments_are_those_of_the_header():
    headers = (HEADER / "sqz/sqz.h").read_text() + (ROOT / "libindex/include/sqz/sqz_build.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    declared = {name: "".join("p" if "*" in one else "l" if "int64_t" in one else "i" for one in arguments.split(","))
                for name, arguments in re.findall(r"SQZ_API sqz_status (\w+)\((.*?)\);", text, flags=re.DOTALL)}
    assert (_library.FUNCTIONS | _builder.FUNCTIONS).items() <= declared.items()
