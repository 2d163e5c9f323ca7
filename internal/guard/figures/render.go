package main

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// fill puts the tables, and the line about the machine, between their marks.
func fill(document string, b *benchmarks) (string, error) {
	document, err := place(document, "machine", machine(b))
	if err != nil {
		return "", err
	}
	shown := map[string]bool{}
	for _, t := range tables {
		text, err := t.render(b, shown)
		if err != nil {
			return "", fmt.Errorf("make table %s of %s: %w", t.name, benchmarksFile, err)
		}
		if document, err = place(document, t.name, text); err != nil {
			return "", err
		}
	}
	return document, nil
}

// place puts generated text between its marks.
func place(document, name, text string) (string, error) {
	begin, end := "<!-- figures: "+name+" -->\n", "<!-- end of "+name+" -->\n"
	before, rest, ok := strings.Cut(document, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return "", fmt.Errorf("%s lacks the lines %q and %q, in this order", documentFile, strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return before + begin + text + end + after, nil
}

// machine describes where the figures were measured.
func machine(b *benchmarks) string {
	a := b.about
	return fmt.Sprintf("Measured on %s at commit %s: %s, %s cores, a load of %s before, %s, %s, iptables %s, nginx %s.\n",
		a["date"], a["commit"], a["cpu"], a["cores"], a["load"], a["kernel"], a["go"], a["iptables"], a["nginx"])
}

// render returns the table, and below it the commands that measured its figures, unless
// a table above shows them.
func (t *table) render(b *benchmarks, shown map[string]bool) (string, error) {
	heads, rulers := []string{t.about}, []string{"---"}
	for _, c := range t.columns {
		heads, rulers = append(heads, c.head), append(rulers, "--:")
	}
	lines, commands := []string{line(heads), line(rulers)}, []string{}
	for _, r := range t.rows {
		cells := []string{r.title()}
		for _, c := range t.columns {
			text, command, err := r.cell(&c, b)
			if err != nil {
				return "", err
			}
			if cells = append(cells, text); command != "" && !shown[command] {
				shown[command], commands = true, append(commands, command)
			}
		}
		lines = append(lines, line(cells))
	}
	text := strings.Join(lines, "\n") + "\n"
	if len(commands) > 0 {
		text += "\n```\n" + strings.Join(commands, "\n") + "\n```\n"
	}
	return text, nil
}

func line(cells []string) string { return "| " + strings.Join(cells, " | ") + " |" }

// title fills in the sizes from the benchmark's name.
func (r *row) title() string {
	title := r.what
	for _, size := range regexp.MustCompile(`(\w+)=([0-9]+)`).FindAllStringSubmatch(r.benchmark, -1) {
		title = strings.ReplaceAll(title, "{"+size[1]+"}", withCommas(size[2]))
	}
	return title
}

// cell returns the figure of a column, and the command that measured it.
func (r *row) cell(c *column, b *benchmarks) (text, command string, err error) {
	if r.none != "" && strings.HasPrefix(c.place, r.none) {
		return "–", "", nil
	}
	name := strings.ReplaceAll(r.benchmark, "*", c.place)
	found := b.results[name]
	if found == nil {
		return "", "", fmt.Errorf("no benchmark %s: %s, or correct tables.go", name, remeasure)
	}
	for _, unit := range c.units {
		unit = strings.ReplaceAll(unit, "*", r.unit)
		if value, ok := found.metric(unit); ok {
			return show(value, unit) + floor(found, unit), found.command, nil
		}
	}
	return "–", "", nil
}

// floor is the time that the kernel alone needs, in brackets.
func floor(r *result, unit string) string {
	if value, ok := r.metric("floor-ms"); ok && unit == "ms" {
		return " (" + show(value, "ms") + ")"
	}
	return ""
}

// nanoseconds converts a value whose unit is one of time.
func nanoseconds(value float64, unit string) (ns float64, ok bool) {
	kind, _, _ := strings.Cut(unit[strings.LastIndexByte(unit, '-')+1:], "/")
	factor, ok := map[string]float64{"ns": 1, "µs": 1e3, "ms": 1e6}[kind]
	return value * factor, ok
}

// show formats a value: counts exactly, anything else with two significant digits.
func show(value float64, unit string) string {
	if ns, ok := nanoseconds(value, unit); ok {
		return inSteps(ns, "ns", "µs", "ms", "s")
	}
	switch {
	case unit == "B/op" || strings.HasPrefix(unit, "bytes/"):
		return inSteps(value, "B", "kB", "MB", "GB")
	case strings.HasSuffix(unit, "MB"):
		return inSteps(value*1e6, "B", "kB", "MB", "GB")
	case strings.HasSuffix(unit, "MB/s"):
		return inSteps(value*1e6, "B/s", "kB/s", "MB/s", "GB/s")
	case strings.HasSuffix(unit, "conn/s") || unit == "packet/s":
		return twoDigits(value)
	case strings.HasSuffix(unit, "MiB"):
		return withCommas(strconv.FormatFloat(value, 'f', 0, 64)) + " MiB"
	case strings.HasSuffix(unit, "%core"):
		return twoDigits(value) + " % of a core"
	case strings.Contains(unit, "/nginx"), strings.HasSuffix(unit, "/rules"):
		return strconv.FormatFloat(value, 'f', 2, 64)
	default:
		return withCommas(strconv.FormatFloat(value, 'f', -1, 64))
	}
}

// inSteps formats a value in the largest of units, a thousand times each, that keeps it above 1.
func inSteps(value float64, units ...string) string {
	for len(units) > 1 && value >= 995 { // rounded to 1000
		value, units = value/1000, units[1:]
	}
	return twoDigits(value) + " " + units[0]
}

// twoDigits rounds to two significant digits.
func twoDigits(value float64) string {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(value, 'g', 2, 64), 64)
	if err != nil || rounded == 0 {
		return "0"
	}
	return withCommas(strconv.FormatFloat(rounded, 'f', max(0, 1-int(math.Floor(math.Log10(rounded)))), 64))
}

func withCommas(number string) string {
	whole, fraction, _ := strings.Cut(number, ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	return strings.TrimSuffix(whole+"."+fraction, ".")
}
