package spctl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// format is the value of --output.
type format string

const (
	asTable format = "table"
	asJSON  format = "json"
	asYAML  format = "yaml"
)

func formats() []string { return []string{string(asTable), string(asJSON), string(asYAML)} }

// String returns the name.
func (f *format) String() string { return string(*f) }

// Type names the flag's value in the help.
func (f *format) Type() string { return "format" }

// Set checks a name.
func (f *format) Set(text string) error {
	if !slices.Contains(formats(), text) {
		return fmt.Errorf("want %s", strings.Join(formats(), ", "))
	}
	*f = format(text)
	return nil
}

// print prints an answer: as table prints it, or as the proxy sent it.
func (a *app) print(c *cobra.Command, answer json.RawMessage, table func(w *printer) error) error {
	var out bytes.Buffer
	var err error
	switch a.output {
	case asJSON:
		if err = json.Indent(&out, bytes.TrimSpace(answer), "", "  "); err == nil {
			out.WriteByte('\n')
		}
	case asYAML:
		err = writeYAML(&out, answer)
	case asTable:
		w := newPrinter(&out)
		if err = table(w); err == nil {
			err = w.tabs.Flush()
		}
	}
	if err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	if _, err := out.WriteTo(c.OutOrStdout()); err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	return nil
}

// writeYAML converts JSON. JSON is YAML in flow style, so that the order of fields stays.
func writeYAML(w io.Writer, content json.RawMessage) error {
	var document yaml.Node
	if err := yaml.Unmarshal(content, &document); err != nil {
		return err
	}
	inBlocks(&document)
	encoder := yaml.NewEncoder(w)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return err
	}
	return encoder.Close()
}

// inBlocks changes JSON's style to YAML's usual one. The encoder quotes a text that would be
// another type without quotes.
func inBlocks(node *yaml.Node) {
	node.Style = 0
	if len(node.Content) == 0 && node.Kind != yaml.ScalarNode {
		node.Style = yaml.FlowStyle // [] and {}
	}
	for _, inner := range node.Content {
		inBlocks(inner)
	}
}

// printer prints lines and aligned tables.
type printer struct{ tabs *tabwriter.Writer }

func newPrinter(w io.Writer) *printer {
	const gap = 3 // as kubectl has it
	return &printer{tabwriter.NewWriter(w, 0, 0, gap, ' ', 0)}
}

// row prints a row. A cell that is empty is a dash, so that columns can be counted.
func (p *printer) row(cells ...string) {
	for i, cell := range cells {
		if cells[i] = oneLine(cell); cell == "" {
			cells[i] = "-"
		}
	}
	p.line(strings.Join(cells, "\t"))
}

// rows prints a table with a heading, and nothing without rows.
func rows[T any](p *printer, heading string, list []T, cells func(T) []string) {
	if len(list) == 0 {
		return
	}
	p.line(strings.Join(strings.Fields(heading), "\t"))
	for _, item := range list {
		p.row(cells(item)...)
	}
	_ = p.tabs.Flush() // to a buffer
}

// line prints a line, or a row whose cells are separated by tabs.
func (p *printer) line(text string) { _, _ = fmt.Fprintln(p.tabs, text) } // to a buffer

// section separates tables.
func (p *printer) section(format string, args ...any) {
	_ = p.tabs.Flush() // to a buffer
	p.line("\n" + oneLine(fmt.Sprintf(format, args...)))
}

// fields prints names and values; without a value, nothing.
func (p *printer) fields(pairs ...string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			p.line(pairs[i] + ":\t" + oneLine(pairs[i+1]))
		}
	}
	_ = p.tabs.Flush() // to a buffer
}

// oneLine keeps texts of others from moving columns, or the terminal's cursor.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, text)
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

func list(texts []string) string { return strings.Join(texts, ",") }

// count returns a number, and nothing for 0.
func count(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}
