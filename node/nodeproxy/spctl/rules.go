package spctl

import (
	"encoding/json"
	"strings"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

func (a *app) rules() *cobra.Command {
	return a.ofService("rules", "Print what the engine programs for one Service", "rules", (*printer).rules)
}

func (w *printer) rules(content json.RawMessage) error {
	answer, err := decode[answers.Rules](content)
	if err != nil {
		return err
	}
	for i, f := range answer.Families {
		if i > 0 {
			w.line("")
		}
		w.line("# " + f.Family)
		for line := range strings.Lines(f.Text) {
			w.line(oneLine(strings.TrimSuffix(strings.ReplaceAll(line, "\t", "    "), "\n")))
		}
	}
	return nil
}
