package guard

import (
	"os"
	"strings"
	"testing"
)

// TestTheReadmeShowsCodeThatCompiles: the README's Go code is the body of the
// Example, between its two marks, one tab further left.
func TestTheReadmeShowsCodeThatCompiles(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("../../nftables/example_linux_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, shown, ok := strings.Cut(string(readme), "```go\n")
	shown, _, closed := strings.Cut(shown, "```")
	if !ok || !closed {
		t.Fatal("README.md shows no Go code")
	}
	marked := strings.Split(string(example), "\t// README\n")
	if len(marked) != 3 {
		t.Fatalf("the Example has %d marks, want 2", len(marked)-1)
	}
	if want := strings.TrimPrefix(strings.ReplaceAll("\n"+marked[1], "\n\t", "\n"), "\n"); shown != want {
		t.Errorf("README shows\n%s\nthe Example is\n%s", shown, want)
	}
}
