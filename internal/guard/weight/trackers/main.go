// Trackers is the least program with trackers alone: what a program with a data plane of its own links at least.
package main

import (
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

func main() {
	tracker, err := changetracker.New(changetracker.Options{})
	if err == nil {
		resolver, updater := desired.Resolver{}, desired.NewUpdater()
		err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			fmt.Println(updater.Next(delta, resolver, desired.Globals{}, false).Changes)
			updater.Done(nil)
			return nil, nil
		})
	}
	fmt.Println(err)
}
