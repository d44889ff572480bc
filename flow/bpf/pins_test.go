package bpf

import "testing"

func TestLayoutVersionIgnoresComments(t *testing.T) {
	a, b := layoutVersion("struct a { // one\n\tint b;\n};\n"), layoutVersion("struct a {\n int b; // other\n};\n")
	if a != b {
		t.Errorf("%s and %s", a, b)
	}
	if c := layoutVersion("struct a {\n long b;\n};\n"); c == a {
		t.Error("another layout has the same version")
	}
}
