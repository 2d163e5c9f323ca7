package cluster

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// shrink drops ops as long as the scenario still fails: halves first, single ones last.
func (sc scenario) shrink(fails func(scenario) bool) scenario {
	for size := max(1, len(sc.ops)/2); ; size /= 2 {
		for i := 0; i < len(sc.ops); {
			smaller := sc
			smaller.ops = slices.Delete(slices.Clone(sc.ops), i, min(i+size, len(sc.ops)))
			if fails(smaller) {
				sc = smaller
			} else {
				i += size
			}
		}
		if size <= 1 {
			return sc
		}
	}
}

// keep returns the scenario with only the ops of a list of indexes: see indexes.
func (sc scenario) keep(list string) (scenario, error) {
	var wanted []int
	for text := range strings.SplitSeq(list, ",") {
		index, err := strconv.Atoi(text)
		if err != nil {
			return sc, fmt.Errorf("-keep: %w", err)
		}
		wanted = append(wanted, index)
	}
	sc.ops = slices.DeleteFunc(slices.Clone(sc.ops), func(o op) bool { return !slices.Contains(wanted, o.index) })
	return sc, nil
}

// indexes is the list for keep.
func (sc scenario) indexes() string {
	var list []string
	for _, o := range sc.ops {
		list = append(list, strconv.Itoa(o.index))
	}
	return strings.Join(list, ",")
}

// story lists the ops in the order in which they happen.
func (sc scenario) story() string {
	var lines []string
	for _, o := range slices.SortedFunc(slices.Values(sc.ops), func(a, b op) int { return int(a.at - b.at) }) {
		lines = append(lines, fmt.Sprintf("%v %s", o.at, o.kind))
	}
	return strings.Join(lines, "\n")
}
