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

// keep returns the scenario with only the ops of a list of indexes, which command prints.
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

// command plays the scenario again.
func (sc scenario) command() string {
	var indexes []string
	for _, o := range sc.ops {
		indexes = append(indexes, strconv.Itoa(o.index))
	}
	return fmt.Sprintf("go test ./internal/cluster -run TestSeeds -seed %d -keep %s", sc.seed, strings.Join(indexes, ","))
}

// story lists the ops in the order in which they happen.
func (sc scenario) story() string {
	var lines []string
	for _, o := range slices.SortedFunc(slices.Values(sc.ops), func(a, b op) int { return int(a.at - b.at) }) {
		lines = append(lines, fmt.Sprintf("%v %s", o.at, o.kind))
	}
	return strings.Join(lines, "\n")
}
