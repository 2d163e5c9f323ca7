package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

const nothing = "–"

// fill puts the tables, and what is to say about the machine, between their marks.
func fill(document string, b *benchmarks) (string, error) {
	about, err := machine(b)
	if err != nil {
		return "", err
	}
	if document, err = place(document, "machine", about); err != nil {
		return "", err
	}
	shown := map[string]bool{}
	for _, t := range tables() {
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

// marks are the lines before and after what is generated.
func marks(name string) (begin, end string) {
	return "<!-- figures: " + name + " -->\n", "<!-- end of " + name + " -->\n"
}

func place(document, name, text string) (string, error) {
	begin, end := marks(name)
	before, rest, ok := strings.Cut(document, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return "", fmt.Errorf("%s lacks the lines %q and %q, in this order", documentFile, strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return before + begin + text + end + after, nil
}

// busy is a load, of one minute, at which somebody else is at work on the machine.
const busy = 0.5

// machine says where the figures were measured. The document promises a quiet machine,
// and a commit that others can check out.
func machine(b *benchmarks) (string, error) {
	a := b.about
	if load, err := strconv.ParseFloat(a["load"], 64); err != nil || load >= busy {
		return "", fmt.Errorf("%s: load %q before the first benchmark, want less than %v: %s", benchmarksFile, a["load"], busy, remeasure)
	}
	if strings.HasSuffix(a["commit"], "-dirty") {
		return "", fmt.Errorf("%s: measured with uncommitted changes (%s): commit them, and %s", benchmarksFile, a["commit"], remeasure)
	}
	return fmt.Sprintf("Measured on %s at commit %s: %s, %s cores, a load of %s before, %s, %s, iptables %s, nginx %s.\n",
		a["date"], a["commit"], a["cpu"], a["cores"], a["load"], a["kernel"], a["go"], a["iptables"], a["nginx"]), nil
}

// render makes the table, and below it the commands that have made its figures, unless
// they have been shown already.
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

// title fills in the sizes that the benchmark's name has.
func (r *row) title() string {
	title := r.what
	for _, size := range regexp.MustCompile(`(\w+)=([0-9]+)`).FindAllStringSubmatch(r.benchmark, -1) {
		title = strings.ReplaceAll(title, "{"+size[1]+"}", withCommas(size[2]))
	}
	return title
}

// cell is the figure of a column, and the command that has made it.
func (r *row) cell(c *column, b *benchmarks) (text, command string, err error) {
	if r.none != "" && strings.HasPrefix(c.place, r.none) {
		return nothing, "", nil
	}
	name := strings.ReplaceAll(r.benchmark, "*", c.place)
	found := b.results[name]
	if found == nil {
		return "", "", fmt.Errorf("no benchmark %s: %s, or mend tables.go", name, remeasure)
	}
	for _, unit := range c.units {
		unit = strings.ReplaceAll(unit, "*", r.unit)
		if value, ok := found.metric(unit); ok {
			return show(value, unit) + floor(found, unit), found.command, nil
		}
	}
	return nothing, "", nil
}

// floor is what nothing but the kernel needs, in brackets after a time.
func floor(r *result, unit string) string {
	value, ok := r.metric("floor-ms")
	if !ok || unit != "ms" {
		return ""
	}
	return " (" + show(value, "ms") + ")"
}

// show shows counts as they are, and anything else by two digits: more of them would
// differ in the next run.
func show(value float64, unit string) string {
	switch {
	case unit == "ns/op":
		return duration(value)
	case unit == "ms" || strings.HasSuffix(unit, "-ms"):
		return duration(value * 1e6)
	case unit == "B/op" || unit == "bytes/client":
		return inSteps(value, "B", "kB", "MB", "GB")
	case strings.HasSuffix(unit, "MB"):
		return inSteps(value*1e6, "B", "kB", "MB", "GB")
	case strings.HasSuffix(unit, "MB/s"):
		return inSteps(value*1e6, "B/s", "kB/s", "MB/s", "GB/s")
	case strings.HasSuffix(unit, "conn/s"):
		return twoDigits(value)
	case strings.Contains(unit, "/nginx"):
		return strconv.FormatFloat(value, 'f', 2, 64)
	default:
		return withCommas(strconv.FormatFloat(value, 'f', -1, 64))
	}
}

func duration(nanoseconds float64) string {
	return inSteps(nanoseconds, "ns", "µs", "ms", "s")
}

// inSteps shows a value in the largest of some units that keeps it above 1. Each unit
// is a thousand of the one before.
func inSteps(value float64, units ...string) string {
	for len(units) > 1 && value >= 995 { // which is shown as 1000
		value, units = value/1000, units[1:]
	}
	return twoDigits(value) + " " + units[0]
}

// twoDigits rounds to two digits that count.
func twoDigits(value float64) string {
	scientific := strconv.FormatFloat(value, 'e', 1, 64)
	_, exponent, _ := strings.Cut(scientific, "e")
	rounded, errOfRounded := strconv.ParseFloat(scientific, 64)
	power, errOfPower := strconv.Atoi(exponent)
	if value == 0 || errOfRounded != nil || errOfPower != nil {
		return "0"
	}
	return withCommas(strconv.FormatFloat(rounded, 'f', max(0, 1-power), 64))
}

func withCommas(number string) string {
	whole, fraction, _ := strings.Cut(number, ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction == "" {
		return whole
	}
	return whole + "." + fraction
}
