package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// fill puts the tables, and the line about the machine, below their marks. A blank line ends each.
func fill(document string, b *benchmarks) (string, error) {
	texts, err := b.render()
	if err != nil {
		return "", err
	}
	a := b.about
	texts["machine"] = fmt.Sprintf("Measured on %s at commit %s: %s, %s cores, a load of %s before, %s, %s, iptables %s, nginx %s.\n",
		a["date"], a["commit"], a["cpu"], a["cores"], a["load"], a["kernel"], a["go"], a["iptables"], a["nginx"])
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		mark := "<!-- figures: " + name + " -->\n"
		before, rest, ok := strings.Cut(document, mark)
		_, after, closed := strings.Cut("\n"+rest, "\n\n")
		if !ok || !closed {
			return "", fmt.Errorf("%s lacks the line %q, or a blank line below the table", documentFile, strings.TrimSpace(mark))
		}
		document = before + mark + texts[name] + "\n" + after
	}
	return document, nil
}

// render returns the tables by name.
func (b *benchmarks) render() (map[string]string, error) {
	texts := map[string]string{}
	for _, t := range tables {
		head, ruler, lines := []string{t.about}, []string{"---"}, ""
		for _, c := range t.columns {
			head, ruler = append(head, c.head), append(ruler, "--:")
		}
		for _, r := range t.rows {
			cells := []string{r.title()}
			for _, c := range t.columns {
				text, err := r.cell(&c, b)
				if err != nil {
					return nil, fmt.Errorf("make table %s of %s: %w", t.name, b.file, err)
				}
				cells = append(cells, text)
			}
			lines += line(cells)
		}
		texts[t.name] = line(head) + line(ruler) + lines
	}
	return texts, nil
}

func line(cells []string) string { return "| " + strings.Join(cells, " | ") + " |\n" }

// title fills in the sizes from the benchmark's name.
func (r *row) title() string {
	title := r.what
	for _, size := range sizeOf.FindAllStringSubmatch(r.benchmark, -1) {
		title = strings.ReplaceAll(title, "{"+size[1]+"}", withCommas(size[2]))
	}
	return title
}

// cell returns the figure of a column. In brackets is the floor: the time that the kernel alone needs.
func (r *row) cell(c *column, b *benchmarks) (string, error) {
	if r.none != "" && strings.HasPrefix(c.place, r.none) {
		return "–", nil
	}
	name, own, _ := strings.Cut(strings.ReplaceAll(r.benchmark, "*", c.place), " ")
	found := b.results[name]
	if found == nil {
		return "", fmt.Errorf("no benchmark %s: %s, or correct tables.go", name, remeasure)
	}
	for unit := range strings.FieldsSeq(strings.ReplaceAll(c.units, "*", own)) {
		if value, ok := found.metric(unit); ok {
			text := show(value, unit)
			if floor, ok := found.metric("floor-ms"); ok && unit == "ms" {
				text += " (" + show(floor, unit) + ")"
			}
			return text, nil
		}
	}
	return "–", nil
}

// show formats a value: counts exactly, anything else with two significant digits.
func show(value float64, unit string) string {
	kind, _, _ := strings.Cut(unit[strings.LastIndexByte(unit, '-')+1:], "/")
	if ns := map[string]float64{"ns": 1, "µs": 1e3, "ms": 1e6}[kind]; ns != 0 {
		return inSteps(value*ns, "ns", "µs", "ms", "s")
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
