package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/sealed"
)

func escrowCommand() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "escrow RECIPIENT...",
		Short: "Encrypt the key of the secrets for somebody who is not on this host",
		Long: `Encrypt sandboxd.key, which opens the secrets of sandboxes, for public keys of age (age1…).
The private key of each recipient opens it alone. Keep the result beside the backups: they
have the secrets, but not their key. It stays good until the key is changed.

Who has the private key opens it with "age -d -i FILE", on any machine. On a new host its
content is to be sandboxd.key, of mode 0600, before the first start or a restore.`,
		Example: `  sandboxd escrow -o /mnt/backups/sandboxd.key.age age1…`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError{errors.New("escrow: want at least one public key of age, age1…; see sandboxd escrow --help")}
			}
			return nil
		},
	}
	path := configFlag(cmd)
	cmd.Flags().StringVarP(&out, "output", "o", "", "new file to write, instead of standard output")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		to, err := backup.ParseRecipients(args)
		if err != nil {
			return usageError{fmt.Errorf("escrow: %w", err)}
		}
		file := filepath.Join(cfg.StateDir, sealed.Credential)
		text, err := sealed.Text(file)
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("escrow: %w: the daemon makes it when it first starts; a service that has it as a credential "+
				"(LoadCredentialEncrypted=) has no such file: encrypt what the credential was made of", err)
		}
		if err != nil {
			return fmt.Errorf("escrow: %w", err)
		}
		defer clear(text)
		var closed bytes.Buffer
		if err := to.Encrypt(&closed, bytes.NewReader(text)); err != nil {
			return fmt.Errorf("escrow: %w", err)
		}
		if out == "" {
			_, err := io.Copy(cmd.OutOrStdout(), &closed)
			return err
		}
		return writeNew(out, closed.Bytes())
	}
	return cmd
}

// writeNew writes a file that is not there yet, synced; after an error it is not there either.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("escrow: %s is there already, and may be the only copy of a key: move it away, or name another file", path)
	}
	if err != nil {
		return fmt.Errorf("escrow: %w", err)
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(fmt.Errorf("escrow: %w", err), os.Remove(path))
	}
	return nil
}
