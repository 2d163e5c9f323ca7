package history

import (
	"os"
	"strings"
	"testing"
)

// TestThePlantedBugsAreInTheDocument: docs/RELIABILITY.md says which history has caught each.
func TestThePlantedBugsAreInTheDocument(t *testing.T) {
	document, err := os.ReadFile("../../docs/RELIABILITY.md")
	if err != nil {
		t.Fatal(err)
	}
	for what := range plants() {
		if row := "| " + what + " |"; !strings.Contains(string(document), row) {
			t.Errorf("docs/RELIABILITY.md does not have this bug: %s", row)
		}
	}
}
