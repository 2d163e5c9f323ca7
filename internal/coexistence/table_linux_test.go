package coexistence

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"
)

// document is the file that the table is in, between two lines.
const document, tableBegins, tableEnds = "../../docs/COEXISTENCE.md", "<!-- table: made by TestBeside -->\n", "<!-- end of table -->\n"

// documentInVM is the file in a virtual machine.
const documentInVM = "/t/files/COEXISTENCE.md"

// table is what packets do beside each program, as the document says, and as it is.
type table struct {
	head, tail string
	text       string

	mu       sync.Mutex
	expected map[string]outcomes // by program and engine
}

func readTable(t *testing.T) *table {
	t.Helper()
	text, err := os.ReadFile(document)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = os.ReadFile(documentInVM)
	}
	check(t, err)
	head, rest, found := strings.Cut(string(text), tableBegins)
	body, tail, ends := strings.Cut(rest, tableEnds)
	if !found || !ends {
		t.Fatalf("%s has no table between %q and %q", document, tableBegins, tableEnds)
	}
	made := &table{head: head, tail: tail, text: body, expected: map[string]outcomes{}}
	var columns []string
	for line := range strings.Lines(body) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if columns == nil {
			columns = cells
			continue
		}
		for i, cell := range cells[1:] {
			if i+1 < len(columns) {
				made.expected[cells[0]+"/"+columns[i+1]] = parseOutcomes(cell)
			}
		}
	}
	return made
}

// expect returns what the document says about a program and an engine; with -update, what
// is.
func (m *table) expect(w *world) outcomes {
	key := w.foreign.name + "/" + w.engine.name
	m.mu.Lock()
	expected, found := m.expected[key]
	m.mu.Unlock()
	if *update {
		expected = w.measure(w.t.Context(), nil)
		m.mu.Lock()
		m.expected[key] = expected
		m.mu.Unlock()
	} else if !found {
		w.t.Fatalf("%s has no row for %s in mode %s: run this test with -update", document, w.foreign.name, w.engine.name)
	}
	return expected
}

// check compares the document with the corpus, or writes it.
func (m *table) check(t *testing.T) {
	t.Helper()
	var body strings.Builder
	body.WriteString("| program | made by | what its rules do |")
	for _, e := range engines() {
		fmt.Fprintf(&body, " %s |", e.name)
	}
	body.WriteString(" what an operator sets |\n|---|---|---|" + strings.Repeat("---|", len(engines())+1) + "\n")
	for _, f := range corpus() {
		fmt.Fprintf(&body, "| %s | %s | %s |", f.name, f.made, f.about)
		for _, e := range engines() {
			fmt.Fprintf(&body, " %s |", m.expected[f.name+"/"+e.name])
		}
		fmt.Fprintf(&body, " %s |\n", f.setting())
	}
	switch {
	case body.String() == m.text:
	case *update:
		check(t, os.WriteFile(document, []byte(m.head+tableBegins+body.String()+tableEnds+m.tail), 0o644))
	default:
		t.Errorf("the table of %s is\n%swant\n%s: run this test with -update", document, m.text, &body)
	}
}

// setting is the last cell of a program.
func (f foreign) setting() string {
	var parts []string
	for line := range strings.Lines(f.advice) {
		parts = append(parts, "`"+strings.NewReplacer("<iptables>", "iptables", "<pods>", "POD-CIDR", "<services>", "SERVICE-CIDR").Replace(strings.TrimSpace(line))+"`")
	}
	if f.socketsAbout != "" {
		parts = append(parts, "in mode userspace also "+f.socketsAbout)
	}
	if f.remark != "" {
		parts = append(parts, f.remark)
	}
	if parts == nil {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}
